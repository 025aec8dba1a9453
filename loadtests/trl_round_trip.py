"""Feedback to TRL and back: ``make trl-round-trip``.

A server of a tiny random model gets chats and texts, and feedback of all kinds on its responses. `millrace data export`
writes them as TRL's sets, JSONL and Parquet; TRL's DPOTrainer, KTOTrainer, SFTTrainer and GRPOTrainer take a step on
each, unchanged, in an environment of their own. A second home imports the sets, exports them again (which must be the
same rows), and takes a step of dpo, kto and sft on them; a third one, without any traffic, a step of grpo on the
prompts. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Final

from loadtests.bench_train import trl_environment
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

HERE: Final = Path(__file__).parent
PROMPTS: Final = 8
FORMS: Final = {"trl-preference": "dpo", "trl-kto": "kto", "trl-sft": "sft"}
TRL_TIMEOUT_S: Final = 900


def collect(home: Path, model: Path) -> None:
    """Requests to a server, and feedback on each of their two responses."""
    port = free_port()
    settings = ["--home", str(home), "--serve.port", str(port), "--serve.engine.kv_cache_bytes", str(64 << 20)]
    run("init", "--model", str(model), *settings, folder=home.parent)
    with Server([MILLRACE, "serve", *settings], port, home.parent / "serve.log") as server:

        def post(path: str, body: dict[str, Any]) -> Any:
            request = urllib.request.Request(
                server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        for i in range(2 * PROMPTS):
            text = f"What is {i} and {i}?"
            prompt = {"prompt": text} if i % 2 else {"messages": [{"role": "user", "content": text}]}
            answer = post("/generate", {**prompt, "max_tokens": 12, "n": 2, "metadata": {"answer": str(2 * i)}})
            first, second = (response["response_id"] for response in answer["responses"])
            for feedback in (
                {"response_id": first, "kind": "preference", "rejected_response_id": second},
                {"response_id": first, "kind": "thumb", "value": 1},
                {"response_id": second, "kind": "thumb", "value": 0},
                {"response_id": second, "kind": "correction", "text": f"It is {2 * i}."},
            ):
                post("/feedback", feedback)


def export(home: Path, folder: Path) -> None:
    """Every format, in both kinds of prompts and both kinds of files."""
    folder.mkdir()
    for form in (*FORMS, "prompts"):
        for style in ("messages", "text"):
            for suffix in ("jsonl", "parquet"):
                file = folder / f"{form}.{style}.{suffix}"
                printed = run("data", "export", str(file), "--format", form, "--prompts", style, "--home", str(home))
                print(printed, end="", flush=True)


def train_with_trl(python: Path, model: Path, folder: Path) -> dict[str, Any]:
    """A step on each file; what it says of each."""
    command = [str(python), str(HERE / "trl_sets.py"), str(model), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TRL_TIMEOUT_S, check=False, cwd=folder)
    if done.returncode != 0:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    steps: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return steps


def bring_back(model: Path, sets: Path, folder: Path) -> dict[str, Any]:
    """Import what was exported, export it again, and take a step on it; by format the rows and the loss."""
    came = {}
    for form, algorithm in FORMS.items():
        home = folder / form
        settings = ["--home", str(home)]
        run("init", "--model", str(model), *settings, folder=folder)
        original = sets / f"{form}.messages.parquet"
        for _ in range(2):  # the second adds nothing
            printed = run("data", "import", str(original), "--format", form, "--source", "first-home", *settings)
            print(printed, end="", flush=True)
        again = folder / f"{form}.jsonl"
        run("data", "export", str(again), "--format", form, *settings)
        before, after = (sorted(file.read_text().splitlines()) for file in (original.with_suffix(".jsonl"), again))
        same = set(before) == set(after)
        data = ["--train.data.prompts_per_step", "4", "--train.data.min_prompts", "4"]
        result = folder / f"{form}.json"
        step = ["--train.steps", "1", "--train.launcher", "torchrun", "--json-out", str(result)]
        run("train", "--train.algorithm.name", algorithm, *data, *step, *settings, folder=folder)
        trained = json.loads(result.read_text())
        came[form] = {"rows": len(after), "same": same, "loss": trained["metrics"]["loss"]}
        if not same:
            raise SystemExit(f"{again} has other rows than {original}")
    return came


def train_on_prompts(model: Path, prompts: Path, folder: Path) -> dict[str, Any]:
    """A step of grpo in a home that never had any traffic, on exported prompts alone."""
    settings = ["--home", str(folder / "prompts"), "--feedback.scoring.rules.long.sql", "length(response)"]
    run("init", "--model", str(model), *settings, folder=folder)
    own = [{"path": str(prompts), "metadata": {"answer": "answer"}}]
    data = [
        "--train.data.prompts",
        json.dumps(own),
        "--train.data.prompts_per_step",
        "4",
        "--train.data.min_prompts",
        "4",
    ]
    result = folder / "prompts.json"
    step = ["--train.steps", "1", "--train.launcher", "torchrun", "--json-out", str(result)]
    sampling = ["--train.rollout.max_tokens", "16", "--train.rollout.kv_cache_bytes", str(64 << 20)]
    run("train", *data, *step, *sampling, *settings, folder=folder)
    trained = json.loads(result.read_text())
    return {"policy": trained["candidate"], "reward": trained["metrics"]["reward"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL; else one is made in runs/trl")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with trl_environment(options.trl_python) as python, tempfile.TemporaryDirectory(prefix="trl-", dir=runs) as place:
        folder = Path(place)
        model = make_model_folder(folder / "model", 1)
        collect(folder / "home", model)
        export(folder / "home", folder / "sets")
        steps = train_with_trl(python, model, folder / "sets")
        (folder / "back").mkdir()
        back = bring_back(model, folder / "sets", folder / "back")
        back["prompts"] = train_on_prompts(model, folder / "sets" / "prompts.messages.jsonl", folder / "back")
    print(json.dumps({"trl": steps, "imported": back}))


if __name__ == "__main__":
    main()
