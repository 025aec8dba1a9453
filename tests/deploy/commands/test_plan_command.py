"""`millrace plan`: a table and JSON from a config.json alone, and one line for each thing that can't be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import cli
from tests.train.planner.public_configs import write


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["plan", "--home", str(folder / "home"), *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_7b_model_is_planned_for_people_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--model", str(write("Qwen2.5-7B", tmp_path)), "--gpus", "8x80GB", "--train.lora.rank", "16"]
    plain = [*on[:4], "--train.micro_batch_tokens", "8192"]
    code, out, err = run(capsys, tmp_path, *plain)
    assert code == 0, err
    for expected in (
        "Qwen2ForCausalLM, 7.62B parameters",
        "step      32 prompts x 8 responses of 512 + 256 tokens",
        "train.micro_batch_tokens: 8192",
        "actor update",
        "more      16 x 80GB",
        "better    8 x H100-80",
        "which the engine leaves free (gpu_memory_utilization 0.788)",
        "own       the server has device 0, training has devices 1 to 7, evaluation has device 1: ",
        "turns     the server has device 0, training has devices 0 to 7, ",
    ):
        assert expected in out
    code, out, err = run(capsys, tmp_path, *plain, "--json")
    assert code == 0, err
    found = json.loads(out, parse_constant=pytest.fail)  # JSON has no Infinity
    assert found["model"]["parameters"] == 7_615_616_512
    assert found["settings"]["train.ranks"] == 8
    assert max(phase["bytes"] for phase in found["phases"]) == found["memory_limit"]["bytes"]
    assert found["memory_limit"]["bytes"] <= found["machine"]["usable"]
    assert found["seconds"] == pytest.approx(sum(phase["cost"]["seconds"] for phase in found["phases"]))
    own, turns = found["devices"]["own"], found["devices"]["in_turns"]
    assert (own["serve"], own["train"], own["waits_for"]) == ([0], list(range(1, 8)), [])
    assert own["settings"]["train.ranks"] == 7
    assert (turns["train"], turns["waits_for"]) == (list(range(8)), ["train", "evaluate"])
    assert turns["seconds"] == found["seconds"] < own["seconds"]


def test_one_device_is_planned_in_turns_and_a_fleet_that_can_not_sleep_needs_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(write("Llama-3-8B", tmp_path)), "--train.lora.rank", "8", "--gpus"]
    code, out, err = run(capsys, tmp_path, *model, "1x80GB")
    assert code == 0, err
    assert "own       no: the server has the only device" in out
    assert "the server sleeps while training or evaluation works" in out
    code, out, err = run(capsys, tmp_path, *model, "2x80GB", "--serve.fleet.replicas", "2")
    assert code == 0, err
    assert "own       no: the server has 2 of 2 devices" in out
    assert "turns     no: a fleet's replicas don't sleep" in out


def test_a_better_machine_is_named_also_where_ranks_are_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--model", str(write("Qwen2.5-7B", tmp_path)), "--gpus", "8xA100", "--train.ranks", "8"]
    code, out, err = run(capsys, tmp_path, *on)
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith(("better", "more"))]
    code, out, err = run(capsys, tmp_path, *on, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["twice_the_devices"] is None
    better = found["next_machine"]
    assert (better["name"], better["settings"]["train.ranks"]) == ("H100-80", 8)
    assert better["seconds"] < found["seconds"]
    assert line == f"better    8 x H100-80: {better['seconds']:.2f} s a step instead of {found['seconds']:.2f}"


def test_the_slots_of_adapters_that_serve_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--model", str(write("Qwen2.5-7B", tmp_path)), "--gpus", "8x80GB", "--json"]
    room = ["--serve.engine.adapters.count", "2", "--serve.engine.adapters.rank", "12"]
    serving = []
    for settings in ([], room):
        code, out, err = run(capsys, tmp_path, *on, *settings)
        assert code == 0, err
        serving.append(json.loads(out)["serving"])
    without, beside = serving
    sides = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)  # q, o; k, v; gate, up, down
    assert beside["weights"] - without["weights"] == 2 * 16 * sides * 28 * 2, "vLLM has slots of rank 16, in bfloat16"
    assert beside["standby"] == without["standby"]


def test_what_does_not_fit_is_one_line_with_what_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write("Llama-3-8B", tmp_path))
    refused = ["--model", model, "--gpus", "1x24GB", "--train.fsdp.cpu_offload", "false"]
    code, out, err = run(capsys, tmp_path, *refused)
    assert (code, out) == (1, "")
    assert "error: nothing fits on 1 x 24GB: with the least memory, actor update needs" in err
    assert "it would fit on 8 x 24GB or on 1 x 192GB" in err


def test_an_algorithm_that_samples_nothing_is_planned_without_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write("gpt2", tmp_path))
    code, out, err = run(capsys, tmp_path, "--model", model, "--gpus", "cpu", "--json", "--train.algorithm.name", "dpo")
    assert code == 0, err
    found = json.loads(out)
    assert [phase["name"] for phase in found["phases"]] == ["reference log_probs", "actor update"]
    assert found["machine"]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpus", "8x80GB"], "no policy serves: name a model's folder or its config.json (--model PATH)"),
        (["--model", "nowhere", "--gpus", "8x80GB"], "nowhere: there is no nowhere; name a model's folder"),
        (["--model", "nowhere"], "name the machine by one of --gpus (8x80GB, 8xH100, cpu) and --machine FILE"),
        (["--model", "nowhere", "--gpus", "8xB52"], "--gpus 8xB52: no such machine; write 8x80GB"),
        (["--model", "nowhere", "--machine", "none.yaml"], "--machine none.yaml: can't be read"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, tmp_path, *arguments)
    assert (code, out) == (2, "")
    assert why in err


def test_a_reward_model_is_not_planned_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--model", str(write("gpt2", tmp_path)), "--gpus", "8x80GB", "--train.algorithm.name", "reward_model"]
    code, _, err = run(capsys, tmp_path, *on)
    assert code == 2
    assert "train.algorithm.name=reward_model trains no policy" in err
