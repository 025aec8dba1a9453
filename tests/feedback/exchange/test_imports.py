"""Sets of others become feedback on imported texts: once, whole, traceable, erasable, and never taken for traffic."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feedback_rows import interaction, put, said

from feedback import datasets
from feedback.config import CaptureConfig, KindsConfig, LakeConfig, ScoringConfig
from feedback.exchange import ImportForm, imports, trl
from feedback.exchange.export import Filter, export
from feedback.exchange.imports import Imported, import_set
from feedback.exchange.record_files import RecordError
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase, find
from feedback.redaction import RedactionError, Redactor
from feedback.scoring.run import score

ASKED = [{"role": "user", "content": "two and two"}]
FOUR, FIVE = ([{"role": "assistant", "content": text}] for text in ("four", "five"))


def tokenise(prompt: trl.Prompt) -> tuple[str, str | None, list[int]]:
    """A token per character; messages in the simplest of templates."""
    if isinstance(prompt, str):
        return prompt, None, [ord(character) for character in prompt]
    text = "".join(f"<{m['role']}>{m['content']}" for m in prompt)
    return text, json.dumps(prompt), [ord(character) for character in text]


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def bring(lake: Lake, path: Path, form: ImportForm, **others: Any) -> Imported:
    settings = {"source": "team", "tokenise": tokenise, **others}
    return import_set(lake, Path(lake.uri).parent / "journal", path, form, **settings)


def select(lake: Lake, query: str) -> list[tuple[Any, ...]]:
    return lake.read(lambda views: views.sql(query).fetchall())


def preference(prompt: str = "two and two", chosen: str = "four", rejected: str = "five") -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("trl-preference", preference()),
        ("trl-preference", {"prompt": ASKED, "chosen": FOUR, "rejected": FIVE}),
        ("trl-kto", {"prompt": "two and two", "completion": "five", "label": False}),
        ("trl-kto", {"prompt": ASKED, "completion": FOUR, "label": True}),
        ("trl-sft", {"prompt": "two and two", "completion": "four"}),
        ("trl-sft", {"prompt": ASKED, "completion": FOUR}),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_is_imported_is_exported_as_it_was(
    lake: Lake, tmp_path: Path, form: Any, row: dict[str, Any], suffix: str
) -> None:
    path = tmp_path / f"set{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        write(path, row)
    assert bring(lake, path, form).feedback == 1
    assert export(lake, form, Filter()).table.to_pylist() == [row]


@pytest.mark.parametrize(
    ("form", "row", "same"),
    [
        ("trl-sft", {"messages": [*ASKED, *FOUR]}, {"prompt": ASKED, "completion": FOUR}),
        (
            "trl-preference",
            {"chosen": [*ASKED, *FOUR], "rejected": [*ASKED, *FIVE]},
            {"prompt": ASKED, "chosen": FOUR, "rejected": FIVE},
        ),
        (
            "trl-preference",
            {"prompt": ASKED, "chosen": [*ASKED, *FOUR], "rejected": [*ASKED, *FIVE]},
            {"prompt": ASKED, "chosen": FOUR, "rejected": FIVE},
        ),
    ],
)
def test_a_prompt_that_stands_within_the_messages_is_found(
    lake: Lake, tmp_path: Path, form: Any, row: dict[str, Any], same: dict[str, Any]
) -> None:
    bring(lake, write(tmp_path / "set.jsonl", row), form)
    assert export(lake, form, Filter()).table.to_pylist() == [same]


def test_imported_texts_have_no_policy_and_are_no_prompts_rollouts_or_scored_responses(
    lake: Lake, tmp_path: Path
) -> None:
    bring(lake, write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "c", "label": True}), "trl-kto")
    [row] = select(
        lake,
        "SELECT status, endpoint, len(response_token_ids), len(logprobs), len(policy_spans), finish_reason, "
        "sampling.temperature, prompt_token_ids, user FROM interactions",
    )
    assert row == ("imported", "import", 0, 0, 0, None, None, [ord("p")], "team")
    scored = score(lake, ScoringConfig(), KindsConfig())
    assert (scored.scored, lake.counts()["rewards"]) == (0, 0)
    assert datasets.prompts(lake) == []
    assert datasets.rollouts(lake).num_rows == 0
    [thumb] = datasets.thumbs(lake).table.to_pylist()
    assert (thumb["response_token_ids"], thumb["logprobs"], thumb["desirable"]) == (None, None, True)


def test_an_imported_response_meets_one_of_traffic_to_the_same_prompt(lake: Lake, tmp_path: Path) -> None:
    ids = tokenise("p")[2]
    put(lake, "interactions", [interaction("served", prompt="p", prompt_token_ids=ids, response="no")])
    put(lake, "feedback", [said("t", "served", "thumb", value=0.0)])
    bring(lake, write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "yes", "label": True}), "trl-kto")
    [pair] = datasets.preference_pairs(lake).table.to_pylist()
    assert (pair["kind"], pair["chosen"], pair["chosen_token_ids"]) == ("thumbs", "yes", None)
    assert (pair["rejected"], pair["rejected_token_ids"]) == ("no", [4, 0])


def test_an_example_whose_texts_are_to_be_redacted_is_left_out_and_counted(lake: Lake, tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "mail a@b.c"}]
    rows = [
        preference("fine"),
        preference("a@b.c"),
        preference("p", chosen="a@b.c"),
        preference("p", rejected="a@b.c"),
        {"prompt": asked, "chosen": FOUR, "rejected": FIVE},
    ]
    path = write(tmp_path / "set.jsonl", *rows)
    with closing(Redactor(CaptureConfig(redact=["email"], redact_timeout_s=60))) as redactor:
        imported = bring(lake, path, "trl-preference", redactor=redactor)
    assert imported == Imported(5, 2, 1, {"redacted": 4})
    assert select(lake, "SELECT DISTINCT prompt FROM interactions") == [("fine",)]


def test_a_redact_function_that_fails_stops_the_import_at_its_line_and_nothing_is_added(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_on_bad.py").write_text("def fails(text):\n    return None if 'bad' in text else text\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path / "set.jsonl", preference("fine"), preference("bad"))
    with (
        closing(Redactor(CaptureConfig(redact=["fails_on_bad:fails"], redact_timeout_s=60))) as redactor,
        pytest.raises(RedactionError, match=r"set\.jsonl, line 2: the redact function fails_on_bad:fails failed"),
    ):
        bring(lake, path, "trl-preference", redactor=redactor)
    assert (lake.counts()["interactions"], lake.counts()["feedback"]) == (0, 0)


def test_a_demonstration_is_no_pair(lake: Lake, tmp_path: Path) -> None:
    bring(lake, write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "c"}), "trl-sft")
    assert datasets.preference_pairs(lake).table.num_rows == 0
    assert datasets.demonstrations(lake).table.num_rows == 1


def test_every_row_names_the_set_it_is_of(lake: Lake, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", preference(), preference("other"))
    bring(lake, path, "trl-preference")
    found = [json.loads(text) for (text,) in select(lake, "SELECT metadata['millrace:import'] FROM interactions")]
    assert {(of["source"], of["file"], of["format"]) for of in found} == {("team", "a.jsonl", "trl-preference")}
    assert sorted(of["where"] for of in found) == ["line 1", "line 1", "line 2", "line 2"]
    assert len({of["sha256"] for of in found}) == 1


@pytest.mark.parametrize("dies_after", range(5))
def test_an_import_that_is_killed_and_repeated_adds_everything_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    rows = [preference(f"prompt {i}") for i in range(5)]
    path = write(tmp_path / "a.jsonl", *rows)
    monkeypatch.setattr(imports, "_ROWS", 4)  # three commits of responses, two of feedback
    append, commits = Lake.append, 0

    def dying(self: Lake, *arguments: Any, **options: Any) -> Any:
        nonlocal commits
        if commits == dies_after:
            raise KeyboardInterrupt
        commits += 1
        return append(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Lake, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            bring(lake, path, "trl-preference")
    bring(lake, path, "trl-preference")
    assert export(lake, "trl-preference", Filter()).table.to_pylist() == rows
    assert {name: lake.counts()[name] for name in ("interactions", "feedback")} == {"interactions": 10, "feedback": 5}
    again = bring(lake, path, "trl-preference")
    assert (again.responses, again.feedback, again.left_out) == (0, 0, {"imported before": 5})


def test_of_two_imports_at_once_the_second_sees_what_the_first_has_added(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", preference(), preference("other"))
    look, others = imports._known, iter([None])

    def overtaken(*arguments: Any) -> set[str]:
        known = look(*arguments)
        for _ in others:  # between its look and its commit, once
            assert bring(lake, path, "trl-preference").feedback == 2
        return known

    monkeypatch.setattr(imports, "_known", overtaken)
    assert bring(lake, path, "trl-preference").left_out == {"imported before": 2}
    assert {name: lake.counts()[name] for name in ("interactions", "feedback")} == {"interactions": 4, "feedback": 2}


def test_rows_that_say_nothing_are_counted_by_reason(lake: Lake, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        preference(),
        preference(),
        preference(chosen="same", rejected="same"),
        preference(prompt=""),
        preference(chosen=""),
    )
    done = bring(lake, path, "trl-preference")
    assert (done.rows, done.responses, done.feedback) == (5, 2, 1)
    assert done.left_out == {"duplicates": 1, "empty": 2, "with two responses that are the same": 1}


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("trl-preference", {"prompt": "p", "chosen": "a"}, "line 2 has no column 'rejected'; it has: prompt, chosen"),
        ("trl-preference", preference(chosen=7), "line 2: column 'chosen' is neither text nor a list of messages"),
        ("trl-kto", {"prompt": "p", "completion": "a", "label": 1}, "line 2: column 'label' is true or false, not 1"),
        ("trl-kto", {"prompt": "p", "completion": ASKED, "label": True}, "line 2: column 'completion' is not one mess"),
        ("trl-sft", {"messages": ASKED}, "line 2: the last of 'messages' is the user's, not the assistant's"),
        ("trl-sft", {"text": "all in one"}, "line 2 has no column 'prompt'; it has: text"),
    ],
)
def test_a_row_that_is_not_of_the_format_is_named_and_nothing_is_imported(
    lake: Lake, tmp_path: Path, form: Any, row: dict[str, Any], message: str
) -> None:
    fine = preference() if form == "trl-preference" else {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(RecordError, match=message):
        bring(lake, write(tmp_path / "a.jsonl", fine, row), form)
    assert lake.counts()["interactions"] == 0


def test_a_source_is_erased_with_all_that_it_brought_and_nothing_else(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig(erasure_key=str(tmp_path / "key"), lock_timeout_s=60))
    lake.create()
    bring(lake, write(tmp_path / "a.jsonl", preference()), "trl-preference")
    bring(lake, write(tmp_path / "b.jsonl", preference("other")), "trl-preference", source="others")
    journal = tmp_path / "journal"
    assert find(lake, journal, Target(user="team")).rows == {"interactions": 2, "feedback": 1, "rewards": 0}
    erase(lake, journal, Target(user="team"))
    assert export(lake, "trl-preference", Filter()).table.to_pylist() == [preference("other")]
    again = bring(lake, tmp_path / "a.jsonl", "trl-preference")
    assert (again.responses, again.feedback) == (2, 1), "what is imported after an erasure is new"


def test_the_same_set_of_two_sources_stands_twice(lake: Lake, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "c", "label": True})
    assert bring(lake, path, "trl-kto").feedback == bring(lake, path, "trl-kto", source="others").feedback == 1
    assert lake.counts()["interactions"] == 2
