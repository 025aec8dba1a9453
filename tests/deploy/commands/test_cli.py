from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from deploy import cli, memory_check
from deploy.config import describe, reference, root
from deploy.config.root import Settings
from feedback.trusted_code import consent_to
from serve.policies.store import PolicyStore
from tests.paths import ROOT


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    output = capsys.readouterr()
    return code, output.out, output.err


def test_help_lists_every_command_once_by_group_and_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    first_words = [line.split()[0] for line in out.splitlines() if re.match(r"  [a-z-]+  ", line)]
    assert [first_words.count(name) for name in cli.COMMANDS] == [1] * len(cli.COMMANDS)
    assert {name for names in cli.GROUPS.values() for name in names} <= cli.COMMANDS.keys()
    assert len(out.splitlines()) < 80
    assert "--serve.host" not in out
    assert "millrace config reference" in " ".join(out.split())


def test_the_topics_of_help_explain_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("help", capsys=capsys)
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if re.match(r"  [a-z]", line)]
    assert {"serve", "serve.engine", "feedback.scoring", "train.algorithm", "evaluation", "cycle"} <= set(listed)
    explained = set()
    for topic in [*reference.topics(), "home"]:
        code, out, _ = run("help", topic, capsys=capsys)
        assert code == 0
        explained |= {line.split()[0] for line in out.splitlines() if line.startswith("  --")}
    assert explained == {f"--{setting.key}" for setting in describe.settings_of(Settings)}
    _, out, _ = run("help", "serve", capsys=capsys)
    assert "[integer, 0 to 65535; default: 8000]" in " ".join(out.split())
    assert "serve.engine" in out
    assert "millrace serve --help" in out


def test_help_of_a_command_is_its_own_and_works_beside_a_file_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    Path("millrace.yaml").write_text("serve: {prot: 1}")
    code, out, _ = run("help", "promote", capsys=capsys)
    assert (code, out.splitlines()[0]) == (0, "Usage: millrace promote [OPTIONS] VERSION")
    code, out, _ = run("config", "reference", "schedule", capsys=capsys)
    assert (code, list(yaml.safe_load(out))) == (0, ["schedule"])


def test_the_reference_of_settings_loads_as_the_defaults_and_has_what_is_below_a_name_as_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run("config", "reference", capsys=capsys)
    assert code == 0
    file = tmp_path / "reference.yaml"
    file.write_text(out)
    assert root.load(file, [], {}) == root.load(None, [], {})
    names = re.findall(r"^ *#?([a-z_A-Z0-9]+):(?= |$)", out, re.MULTILINE)
    settings = [setting.key.rsplit(".", 1)[-1] for setting in describe.settings_of(Settings)]
    assert Counter(settings) <= Counter(names)
    assert re.search(r"^      #rubric:$", out, re.MULTILINE)  # required, below a section that is not there
    _, one, _ = run("config", "reference", "serve.port", capsys=capsys)
    assert one == "serve:\n  # Port to listen on. (integer, 0 to 65535)\n  port: 8000\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(command, "--help", capsys=capsys)
    assert code == 0
    assert len(out.splitlines()) > 4


def test_help_imports_nothing_heavy() -> None:
    heavy = ["torch", "vllm", "ray", "transformers", "duckdb", "deltalake", "matplotlib", "fastapi", "numpy", "pyarrow"]
    code = (
        "import sys; from deploy import cli; cli.run(['--help']);"
        f"loaded = [m for m in {heavy} if m in sys.modules]; sys.exit(str(loaded) if loaded else 0)"
    )
    path = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_settings_may_stand_before_and_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (
        ["--print-config", "--serve.port", "81"],
        ["--serve.port=81", "--print-config"],
        ["policies", "--serve.port", "81", "--print-config"],
    ):
        code, out, _ = run(*line, capsys=capsys)
        assert code == 0
        assert yaml.safe_load(out)["serve"]["port"] == 81


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["query"], "there is no command query; did you mean `millrace lake sql`?"),
        (["help", "sevre.engine"], "there is no topic sevre.engine; did you mean serve.engine?"),
        (["help", "polices"], "did you mean policies?"),
        (["config", "reference", "shedule"], "there is no section or setting shedule; did you mean schedule?"),
        (["help", "cron"], "there is no topic cron; did you mean schedule.cron?"),
        (["erase"], "there is no command erase; did you mean `millrace lake erase`?"),
        (["policies", "--serve.prot", "1"], "did you mean serve.port?"),
        (["policies", "--serve.port"], "--serve.port needs a value"),
        (["--config", "nowhere.yaml", "policies"], "nowhere.yaml"),
        (["polices"], "policies"),
        (["promote"], "VERSION"),
        (["promote", "1", "--override"], "--why"),
        (["promote", "x"], "'x' is not a valid integer"),
    ],
)
def test_a_wrong_command_line_is_one_clear_message_and_code_2(
    line: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(*line, capsys=capsys)
    assert code == 2
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["promote", "7"], "no policy 7"),
        (["rollback"], "nothing to roll back"),
        (["up"], "no policy serves in"),
        (["up", "./nowhere"], "no folder ./nowhere"),
        (["init", "--model", "./nowhere"], "no folder ./nowhere"),
    ],
)
def test_what_fails_is_one_line_and_code_1(line: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*line, capsys=capsys)
    assert code == 1
    assert says in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run("--debug", "promote", "7", capsys=capsys)
    assert "Traceback" in err


def test_init_makes_policy_1_and_a_config_file_that_loads(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("init", "--model", str(model), "--home", "h", capsys=capsys)
    assert code == 0, err
    assert "policy 1" in out
    code, out, _ = run("policies", "--json", "--home", "h", capsys=capsys)
    (policy,) = json.loads(out)
    assert (policy["version"], policy["serves"], policy["parent"]) == (1, True, None)
    assert policy["lineage"]["architecture"] == "Qwen3ForCausalLM"
    _, out, _ = run("--print-config", capsys=capsys)  # reads the millrace.yaml that init wrote
    loaded = yaml.safe_load(out)
    assert loaded["home"] == str(Path("h").absolute())
    assert (loaded["cycle"]["recipe"], loaded["evaluation"]["scorer"]) == ("auto", "reward_model")
    assert 0 < loaded["evaluation"]["holdout"] < 1
    written = Path("millrace.yaml").read_text()
    assert len(re.findall(r"^ *[a-z]", written, re.MULTILINE)) <= 13
    assert loaded["train"]["rollout"]["max_tokens"] == 64  # half of this model's short context
    rest = written[written.index("# feedback:") :]  # what is commented out can be switched on
    Path("on.yaml").write_text(re.sub("^# ?", "", rest, flags=re.MULTILINE))
    scoring = root.load(Path("on.yaml"), [], {}).feedback.scoring
    assert scoring.judge is not None
    assert "{prompt}\nAnswer: {response}\n" in scoring.judge.rubric
    assert scoring.rules["polite"].function == "my_rewards:reward"
    code, _, err = run("init", "--model", str(model), "--home", "h", capsys=capsys)
    assert code == 1
    assert "initialised already" in err


def test_history_says_who_had_which_policy_serve_and_why(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("init", "--model", str(model), "--home", "h", capsys=capsys)
    store = PolicyStore(Path("h/policies"))
    store.publish(Path("h/policies/v000001"), parent=1, lineage={}, metrics={})
    _follow(store)
    run("promote", "2", "--home", "h", "--override", "--why", "a try", capsys=capsys)
    run("rollback", "--home", "h", "--why", "it was worse", capsys=capsys)
    code, out, _ = run("history", "--home", "h", capsys=capsys)
    assert code == 0
    first, second, third = out.splitlines()[1:]
    assert "init from" in first
    assert "overridden (policy 2 was not evaluated" in second
    assert "a try" in second
    assert "back from 2" in third
    assert "it was worse" in third
    code, out, _ = run("history", "--home", "h", "--json", capsys=capsys)
    assert [(move["version"], move["served"]) for move in json.loads(out)] == [(1, True), (2, None), (1, None)]
    with (store.root / "outcomes.jsonl").open("a") as outcomes:
        outcomes.write("garbage\n")
    code, out, err = run("history", "--home", "h", "--json", capsys=capsys)
    assert (code, [move["served"] for move in json.loads(out)]) == (0, [None] * 3)
    assert "outcomes.jsonl, line 2 is no outcome" in err


def test_a_rollback_to_what_never_served_is_refused_and_its_override_is_in_the_history(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("init", "--model", str(model), "--home", "h", capsys=capsys)
    store = PolicyStore(Path("h/policies"))
    store.publish(Path("h/policies/v000001"), parent=1, lineage={}, metrics={})
    _follow(store)
    code, _, err = run("rollback", "--home", "h", "--to", "2", capsys=capsys)
    assert code == 1
    assert "policy 2 has not served" in err
    code, _, err = run("rollback", "--home", "h", "--to", "2", "--override", capsys=capsys)
    assert code == 2
    assert "--why" in err
    code, _, err = run("rollback", "--home", "h", "--to", "2", "--override", "--why", "a try", capsys=capsys)
    assert code == 0, err
    _, out, _ = run("history", "--home", "h", capsys=capsys)
    assert "back from 1, overridden (policy 2 has not served)" in out.splitlines()[-1]

    _, out, _ = run("audit", "--home", "h", "--action", "policy.*", "--last", "2", "--json", capsys=capsys)
    refused, done = json.loads(out)
    assert (refused["action"], refused["subject"]["to"]) == ("policy.rollback", 2)
    assert refused["outcome"].startswith("failed: PromotionRefused: policy 2 has not served")
    assert (done["outcome"], done["subject"]["why"], done["result"]["version"]) == ("done", "a try", 2)
    assert done["who"].endswith(f"@{socket.gethostname()}")
    _, out, _ = run("audit", "--home", "h", "--last", "1", capsys=capsys)
    assert out.splitlines()[-1].endswith("policy.rollback  to=2 why=a try override=True version=2 generation=2  done")
    _, head, _ = run("audit", "--home", "h", "--head", capsys=capsys)
    assert run("audit", "--home", "h", "--since", head.strip(), capsys=capsys)[0] == 0
    code, _, err = run("audit", "--home", "h", "--since", f"2:{'0' * 64}", capsys=capsys)
    assert (code, "does not go on from 2:0000" in err) == (1, True)
    assert run("audit", "--home", "h", "--since", "all", capsys=capsys)[0] == 2
    file = Path("h/audit.jsonl")
    file.write_bytes(file.read_bytes().replace(b"a try", b"a lie"))
    code, _, err = run("audit", "--home", "h", capsys=capsys)
    assert (code, "is not as it was written" in err) == (1, True)


def _follow(store: PolicyStore) -> None:
    """A server serves what the pointer names."""
    pointer = store.serving()
    assert pointer is not None
    store.record_outcome(pointer, served=True, by="replica-0")


def test_init_refuses_what_is_no_causal_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    code, _, err = run("init", "--model", str(folder), capsys=capsys)
    assert code == 1
    assert "config.json" in err
    (folder / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    code, _, err = run("init", "--model", str(folder), capsys=capsys)
    assert code == 1
    assert "BertForMaskedLM" in err
    (folder / "config.json").write_text('{"architectures": ["NobodysForCausalLM"]}')
    code, _, err = run("init", "--model", str(folder), capsys=capsys)
    assert code == 1
    assert "NobodysForCausalLM" in err
    assert "train.model.class" in err


def test_a_model_with_code_becomes_a_policy_by_the_consent_that_the_error_names(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    folder = tmp_path / "coded"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    kind = config["architectures"][0]
    config |= {"architectures": ["OurForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_our.OurForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    code_of_model = f"from transformers import {kind}\n\nclass OurForCausalLM({kind}):\n    pass\n"
    (folder / "modeling_our.py").write_text(code_of_model)
    code, _, err = run("init", "--model", str(folder), "--home", "h", capsys=capsys)
    assert code == 1
    (named,) = re.findall(r"set train\.model\.trusted_code to (\{.*\})\. ", err)
    consent = ("--train.model.trusted_code", named)
    code, _, err = run("init", "--model", str(folder), "--home", "h", *consent, capsys=capsys)
    assert code == 0, err
    assert Path("h/policies/v000001/modeling_our.py").read_text() == code_of_model
    settings = root.load(None, [("home", "h")])
    assert settings.train.model.trusted_code == {name: [digest] for name, digest in json.loads(named).items()}
    memory_check.require_server(settings, None, print)
    consent_to({})
    for require in (memory_check.require_server, memory_check.require_training):
        with pytest.raises(root.ConfigError, match=r"modeling_our\.py is not named"):
            require(settings, None, print)


def test_no_argument_of_vllm_runs_code_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    for section in ("serve", "evaluation"):
        option = (f"--{section}.engine.extra", "{trust_remote_code: true}")
        code, _, err = run("status", *option, capsys=capsys)
        assert (code, "runs by train.model.trusted_code" in err) == (2, True)


def test_init_converts_pickled_weights(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    import torch
    from safetensors.torch import load_file

    folder = tmp_path / "pickled"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    code, _, err = run("init", "--model", str(folder), "--home", "h", capsys=capsys)
    assert code == 0, err
    made = load_file("h/policies/v000001/model.safetensors")
    assert all(torch.equal(made[name], weights[name]) for name in made)
    assert not list(Path("h/policies/v000001").glob("*.bin"))


def test_a_command_ends_although_a_reward_that_it_gave_up_hangs() -> None:
    code = """if True:
        import threading
        from concurrent.futures import ThreadPoolExecutor
        import pyarrow as pa
        from feedback.processes.exit import end_process
        from train.data.rewards import RewardError, with_timeout

        def hang(rows):
            with ThreadPoolExecutor(1) as pool:  # whose threads Python waits for when it ends
                pool.submit(threading.Event().wait).result()

        try:
            with_timeout(hang, 0.1)(pa.table({"response": ["x"]}))
        except RewardError as error:
            print(error)
            end_process(1)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (
        1,
        "the reward of 1 responses took longer than train.step_timeout_s=0.1 s\n",
    )
