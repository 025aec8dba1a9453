from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from feedback_rows import append, interaction, rows, thumb
from hypothesis import given, settings
from hypothesis import strategies as st

from feedback.journal.codec import to_batch
from feedback.journal.recovery import load_all, recover
from feedback.journal.segment import END_MARK, SegmentName, decode, encode_batch, encode_schema, list_segments, scan
from feedback.journal.writer import Journal
from feedback.schema import FEEDBACK, INTERACTIONS

NAME = SegmentName("feedback", "replica-0", "0" * 31 + "a", 1)


def segment_of(batches: list[list[str]], name: SegmentName = NAME) -> tuple[bytes, list[int]]:
    """The bytes of a segment of thumbs with these response ids, and where each message ends."""
    data = encode_schema(name)
    ends = [len(data)]
    for number, batch in enumerate(batches, start=1):
        data += encode_batch(to_batch([thumb(response, 1) for response in batch], FEEDBACK), name, number)
        ends.append(len(data))
    return data, ends


def responses(data: bytes, name: SegmentName = NAME) -> list[str]:
    return decode(data, name, scan(data, name)).column("response_id").to_pylist()


def written(folder: Path, data: bytes, name: SegmentName = NAME, suffix: str = ".open") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}{suffix}"
    path.write_bytes(data)
    return path


def test_any_arrow_reader_reads_a_whole_segment():
    data, _ = segment_of([["a", "b"], ["c"]])
    with pa.ipc.open_stream(data + END_MARK) as reader:
        assert reader.read_all().column("response_id").to_pylist() == ["a", "b", "c"]


def test_every_column_of_an_interaction_comes_back():
    name = SegmentName("interactions", "w", "0" * 32, 1)
    row = interaction("r", user="ann", seed=None) | {"metadata": {"k": "v"}}
    del row["seed"]
    data = encode_schema(name) + encode_batch(to_batch([row], INTERACTIONS), name, 1)
    table = decode(data, name, scan(data, name))
    assert table.schema == INTERACTIONS
    [back] = table.to_pylist()
    assert back["metadata"] == [("k", "v")]
    assert back["created_at"] == row["created_at"]
    assert back["logprobs"] == row["logprobs"]
    assert back["policy_spans"] == row["policy_spans"]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    cut=st.floats(0, 1, exclude_max=True),
    junk=st.sampled_from([b"", b"\x00" * 64, b"\xff" * 32, b"\xff\xff\xff\xff\x10\x00\x00\x00"]),
)
def test_a_torn_tail_is_cut_and_everything_before_it_survives(sizes, cut, junk):
    batches = [[f"{number}-{row}" for row in range(size)] for number, size in enumerate(sizes)]
    data, ends = segment_of(batches)
    length = int(cut * len(data))
    torn = data[:length] + junk
    intact = [end for end in ends if torn[:end] == data[:end]]  # junk may happen to be the bytes that were lost
    whole = len(intact) - 1 if intact else 0
    assert responses(torn) == [row for batch in batches[:whole] for row in batch]
    if intact:
        assert scan(torn, NAME).end == intact[-1]


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_the_message_that_it_is_in_and_no_other(place, bit):
    batches = [["a1", "a2"], ["b1"], ["c1", "c2"], ["d1"]]
    data, ends = segment_of(batches)
    at = int(place * len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    hit = sum(end <= at for end in ends) - 1  # -1: in the schema
    assert responses(flipped) == [row for number, batch in enumerate(batches) if number != hit for row in batch]


def test_a_message_of_another_segment_is_not_taken():
    other = SegmentName("feedback", "replica-0", "0" * 31 + "b", 1)
    mine, _ = segment_of([["a"]])
    foreign, ends = segment_of([["x"], ["y"]], other)
    assert responses(mine + foreign[ends[1] :]) == ["a"]


def test_a_message_that_stands_there_twice_counts_once():
    data, ends = segment_of([["a"], ["b"]])
    assert responses(data + data[ends[1] :]) == ["a", "b"]


def test_recovery_cuts_the_tail_closes_the_segment_and_can_be_repeated(tmp_path):
    data, _ = segment_of([["a"], ["b"]])
    path = written(tmp_path, data + data[-100:-30])
    closed = recover(tmp_path)
    assert closed == [path.with_suffix(".arrows")]
    assert closed[0].read_bytes() == data + END_MARK
    assert recover(tmp_path) == []
    with pa.ipc.open_stream(closed[0].read_bytes()) as reader:
        assert reader.read_all().num_rows == 2


@pytest.mark.parametrize("keep", [0, 5, 500])
def test_recovery_removes_a_segment_that_never_held_a_row(tmp_path, keep):
    data, ends = segment_of([["a"]])
    written(tmp_path, data[: min(keep, ends[0])])
    assert recover(tmp_path) == []
    assert list_segments(tmp_path) == []


def test_recovery_finishes_a_segment_that_was_about_to_be_renamed(tmp_path):
    data, _ = segment_of([["a"]])
    written(tmp_path, data + END_MARK)
    [closed] = recover(tmp_path)
    assert closed.read_bytes() == data + END_MARK


def test_recovery_leaves_a_living_writers_segment_alone(folder, journal):
    append(journal, "feedback", thumb("a", 1))
    assert recover(folder) == []
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["a"]
    append(journal, "feedback", thumb("b", 1))
    assert rows(folder, "feedback").column("response_id").to_pylist() == ["a", "b"]


def test_files_that_are_no_segment_are_left_out_and_left_alone(tmp_path):
    data, _ = segment_of([["a"]])
    written(tmp_path, data)
    for name in ("notes.txt", "feedback.arrows", f"{NAME}.arrows.bak", f"feedback.ü.{'0' * 32}.0000000001.open"):
        (tmp_path / name).write_text("mine")
    assert len(list_segments(tmp_path)) == 1
    recover(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_segment_that_was_closed_or_sealed_since_the_listing_is_still_found_or_skipped(tmp_path):
    data, _ = segment_of([["a"]])
    path = written(tmp_path, data)
    other = SegmentName("feedback", "replica-1", "0" * 32, 1)
    written(tmp_path, segment_of([["b"]], other)[0], other)
    listing = list_segments(tmp_path)
    recover(tmp_path)
    path.with_suffix(".arrows").unlink()
    assert [segment.name for segment, _ in load_all(tmp_path)] == [other]
    assert len(listing) == 2


@pytest.mark.parametrize("writer", ["", "a.b", "a/b", "ü", "x" * 65])
def test_a_writers_name_that_is_no_file_name_is_refused(tmp_path, writer):
    from feedback.config import JournalConfig

    with pytest.raises(ValueError, match="writer"):
        Journal(tmp_path, JournalConfig(), writer)
