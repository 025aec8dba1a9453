"""Prompts of one's own: read from files, tokenised as the server does, filtered, counted and mixed with traffic."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3Config

from deploy.examples.demo.seed import make_tokenizer
from feedback.config import LakeConfig
from feedback.exchange.record_files import RecordError
from feedback.lake.tables import Lake
from serve.generation.tokenizer import Text
from serve.policies.store import MANIFEST
from tests.feedback.feedback_rows import interaction, put
from train.config.training import TrainConfig
from train.data import pass_rates
from train.data.prompts import Cycled, Mixed, TrainingData

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a model of 20 tokens of context, of which a response may have 8."""
    folder = tmp_path_factory.mktemp("policies") / "v000003"
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=20).save_pretrained(folder)
    return folder


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    return lake


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(lake: Lake, policy: Path, *sources: dict[str, Any], **data: Any) -> TrainingData:
    settings = {"prompts_per_step": 4, "prompts": list(sources), **data}
    config = {"data": settings, "rollout": {"max_tokens": 8}, "runs": policy.parent.parent / "runs"}
    return TrainingData.of(lake, lake.versions(), TrainConfig.model_validate(config), policy, 7)


def texts(data: TrainingData) -> list[str | None]:
    return [prompt.prompt for prompt in data.prompts.items]


def test_text_and_messages_have_the_token_ids_that_the_server_would_give_them(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "ends ab"}]
    file = write(tmp_path / "own.jsonl", {"prompt": "odds ab>"}, {"prompt": chat})
    first, second = read(lake, policy, {"path": file}).prompts.items
    server = Text(AutoTokenizer.from_pretrained(policy))
    assert first.prompt_token_ids == asyncio.run(server.encode("odds ab>", special_tokens=True))
    assert second.prompt == "uends ab>"
    assert second.prompt_token_ids == asyncio.run(server.encode("uends ab>", special_tokens=False))
    assert (first.messages, json.loads(second.messages)) == (None, chat)


def test_columns_are_mapped_and_a_text_can_be_put_into_the_chat_template(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "own.jsonl", {"question": "ends ab", "solution": "b", "level": 3, "none": None})
    mapped = {"prompt": "question", "metadata": {"answer": "solution", "level": "level", "none": "none"}}
    [prompt] = read(lake, policy, {"path": file, "as_user_message": True, **mapped}).prompts.items
    assert prompt.prompt == "uends ab>"
    assert prompt.metadata == {"answer": "b", "level": "3"}


def test_a_prompt_with_a_token_that_the_tokenizer_has_and_the_model_does_not_is_left_out(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    larger = shutil.copytree(policy, tmp_path / "policies" / policy.name)
    tokenizer = AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(larger)
    file = write(tmp_path / "own.jsonl", {"prompt": "ends <more>"}, {"prompt": "ends ab>"})
    data = read(lake, larger, {"path": file})
    assert texts(data) == ["ends ab>"]
    assert data.own[0].left_out == {"tokens that the model does not have": 1}


def test_rows_that_teach_nothing_are_left_out_and_counted_by_reason(lake: Lake, policy: Path, tmp_path: Path) -> None:
    suite = write(tmp_path / "suite.jsonl", {"id": "1", "prompt": "held out"})
    rows = ["odds ab>", "odds ab>", "", "o" * 13, "HELD  out", "ends ab>"]
    call = [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write(tmp_path / "own.jsonl", *({"prompt": prompt} for prompt in [*rows, call, answered]))
    data = read(lake, policy, {"path": file}, exclude_suites=[suite])
    assert texts(data) == ["odds ab>", "ends ab>"]
    assert data.own[0].left_out == {
        "duplicates": 1,
        "empty": 1,
        "too long": 1,
        "of a held-out suite": 1,
        "with messages that hold more than text": 1,
        "with a prompt that ends with the assistant's turn": 1,
    }
    assert data.prompts_left_out["prompts_left_out/too_long"] == 1.0
    assert "2 prompts of own.jsonl (1 duplicates, 1 empty" in str(data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"own.jsonl, line 3 is not JSON"),
        ("[1]", r"own.jsonl, line 3 is not a JSON object, one a line, but list"),
        ('{"text": "a"}', r"own.jsonl, line 3 has no column 'prompt'; it has: text"),
        ('{"prompt": 7}', r"own.jsonl, line 3: column 'prompt' is neither text nor a list of messages"),
        ('{"prompt": [{"content": "a"}]}', r"own.jsonl, line 3: column 'prompt' is neither text nor"),
        ("\xff", r"own.jsonl, line 3 is not JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(
    lake: Lake, policy: Path, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "own.jsonl").write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(RecordError, match=message):
        read(lake, policy, {"path": tmp_path / "own.jsonl"})


def test_a_parquet_file_and_a_saved_datasets_folder_hold_the_same_prompts(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    table = pa.table({"prompt": ["odds ab>", "ends ab>"], "answer": ["a", "b"]})
    pq.write_table(table, tmp_path / "own.parquet")
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for part in range(2):
        pq.write_table(table.slice(part, 1), hub / f"train-0000{part}-of-00002.parquet")
    for path in ("own.parquet", "saved", "saved/train", "hub"):
        data = read(lake, policy, {"path": tmp_path / path, "metadata": {"answer": "answer"}})
        assert [(p.prompt, p.metadata) for p in data.prompts.items] == [
            ("odds ab>", {"answer": "a"}),
            ("ends ab>", {"answer": "b"}),
        ], path
    shutil.copy(hub / "train-00000-of-00002.parquet", hub / "test-00000-of-00001.parquet")
    with pytest.raises(RecordError, match="has several splits; name one of: test, train"):
        read(lake, policy, {"path": tmp_path / "hub"})
    assert texts(read(lake, policy, {"path": tmp_path / "hub", "split": "test"})) == ["odds ab>"]


@pytest.mark.parametrize(("name", "message"), [("none.jsonl", "there is no file or folder"), ("x.csv", "has none of")])
def test_what_is_no_set_is_refused_by_name(lake: Lake, policy: Path, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "x.csv").touch()
    with pytest.raises(RecordError, match=message) as refused:
        read(lake, policy, {"path": tmp_path / name})
    assert name in str(refused.value)


# ------------------------------------------------------------------------------------------- together with traffic


def test_a_prompt_that_traffic_has_too_is_drawn_with_the_metadata_of_the_file(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    asked = [interaction(p, prompt=p, prompt_token_ids=tokenizer(p).input_ids) for p in ("odds ab>", "odds cd>")]
    put(lake, "interactions", asked)
    file = write(tmp_path / "own.jsonl", {"prompt": "odds ab>", "answer": "mine"})
    data = read(lake, policy, {"path": file, "metadata": {"answer": "answer"}})
    assert {p.prompt: p.metadata["answer"] for p in data.prompts.items} == {"odds cd>": "four", "odds ab>": "mine"}
    left_out = "0 too long, 0 of a held-out suite, 1 duplicates"
    assert f"1 prompts of traffic (left out: {left_out}), 1 prompts of own.jsonl" in str(data)


def test_with_a_weight_of_zero_traffic_is_not_drawn_and_an_empty_lake_is_enough(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "own.jsonl", {"prompt": "odds ab>"}, {"prompt": "ends ab>"})
    for weight in (0.0, 1.0):
        data = read(lake, policy, {"path": file}, traffic_weight=weight)
        assert (data.usable, len(data.prompts.at(3))) == (2, 4)
    put(lake, "interactions", [interaction("x", prompt="x", prompt_token_ids=[5])])
    assert texts(read(lake, policy, {"path": file}, traffic_weight=0)) == ["odds ab>", "ends ab>"]


@given(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 30))
def test_each_source_is_drawn_as_often_as_its_weight_says_and_each_item_before_any_comes_again(
    weights: list[float], count: int, steps: int
) -> None:
    sources = [Cycled([(i, item) for item in range(5)], 1, str(i)) for i in range(len(weights))]
    mixed = Mixed(sources, weights, count)
    drawn = [item for step in range(steps) for item in mixed.at(step)]
    assert len(drawn) == steps * count
    for i, weight in enumerate(weights):
        mine = [item for source, item in drawn if source == i]
        assert abs(len(mine) - len(drawn) * weight / sum(weights)) <= 1
        often = [mine.count(item) for item in range(5)]
        assert max(often) - min(often) <= 1


def test_the_data_are_other_data_once_a_file_has_changed(lake: Lake, policy: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "own.jsonl", {"prompt": "odds ab>", "answer": "a"})
    source = {"path": file, "metadata": {"answer": "answer"}}
    before = read(lake, policy, source)
    assert read(lake, policy, source).digest == before.digest
    write(file, {"prompt": "odds ab>", "answer": "b"})
    after = read(lake, policy, source)
    assert after.digest != before.digest
    assert after.own[0].sha256 != before.own[0].sha256


# ------------------------------------------------------------------------------------------------------ pass rates


def manifest(policies: Path, version: int, parent: int | None, run: str) -> Path:
    folder = policies / f"v{version:06d}"
    folder.mkdir(exist_ok=True)
    of = {"version": version, "parent": parent, "created_at": "2026-03-01T12:00:00Z", "files": {}, "sha256": "0" * 64}
    (folder / MANIFEST).write_text(json.dumps({**of, "lineage": {"run": run}, "metrics": {}}))
    return folder


def test_prompts_that_the_lineages_runs_always_or_never_solved_are_left_out(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "policies").mkdir(parents=True)
    shutil.copytree(policy, home / "policies" / "v000003")
    manifest(home / "policies", 1, None, "zero")
    manifest(home / "policies", 2, 1, "one")
    parent = manifest(home / "policies", 3, 2, "two")
    tokenizer = make_tokenizer()
    prompts = {name: f"odds {name}>" for name in ("never", "always", "some", "few", "new")}
    keys = {name: pass_rates.key(tokenizer(prompt).input_ids) for name, prompt in prompts.items()}
    window = TrainConfig.model_validate({"data": {"prompts": [{"path": "x"}], "pass_rate": {}}}).data.pass_rate
    assert window is not None
    for run, counts in {
        "one": {"never": [4, 0], "always": [4, 4], "some": [8, 8]},
        "two": {"never": [4, 0], "always": [4, 4], "some": [1, 0], "few": [7, 0]},
        "other": {"new": [8, 0]},  # of another lineage
    }.items():
        (home / "runs" / run).mkdir(parents=True)
        pass_rates.keep(home / "runs" / run, window, {keys[name]: count for name, count in counts.items()})
    file = write(tmp_path / "own.jsonl", *({"prompt": prompt} for prompt in prompts.values()))
    data = read(lake, parent, {"path": file}, pass_rate={})
    assert texts(data) == [prompts[name] for name in ("some", "few", "new")]
    assert data.own[0].left_out == {"solved too often": 1, "solved too seldom": 1}
    assert len(texts(read(lake, parent, {"path": file}, pass_rate={"runs": 1}))) == 5, "the last run alone has few"
    narrow = read(lake, parent, {"path": file}, pass_rate={"high": 0.8, "min_responses": 7})
    assert texts(narrow) == [prompts["new"]]
    assert len(texts(read(lake, parent, {"path": file}, pass_rate={"solved_reward": 0.5}))) == 5, "counted otherwise"
    shutil.rmtree(home / "policies" / "v000002")
    assert len(texts(read(lake, parent, {"path": file}, pass_rate={}))) == 5, "a policy that was removed ends the line"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"traffic_weight": 0}}, "train.data.traffic_weight=0 draws no prompts of traffic"),
        ({"data": {"pass_rate": {}}}, "train.data.pass_rate is of train.data.prompts, which has none"),
        ({"data": {"prompts": [{"path": "x", "weight": 0}]}}, "greater than 0"),
        ({"data": {"prompts": [{"path": "x"}], "pass_rate": {"low": 0.5, "high": 0.5}}}, r"low \(0.5\) must be less"),
        ({"data": {"prompts": [{"path": "x"}]}, "algorithm": {"name": "dpo"}}, "take out train.data.prompts="),
        ({"data": {"traffic_weight": 0, "traffic_share": 1}}, "take out train.data.traffic_weight=0"),
        ({"data": {"pass_rate": {}}, "algorithm": {"name": "kto"}}, "take out train.data.pass_rate="),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate(settings)
