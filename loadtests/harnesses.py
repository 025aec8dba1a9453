"""lm-eval and Inspect, unchanged, on an endpoint and on a policy's folder: ``make harness``.

Both are installed in environments of their own in runs/, by the commands that ``millrace evaluate --harness`` prints
where one is missing. Each runs on a server that records traffic, by its own key, and on a server of the policy alone;
lm-eval also on vLLM's own server of the policy's folder. The policy's answers must score alike on all of them, and the
lake must have nothing of it beside the one request of an application. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Final

from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

CONTEXT: Final = 1024
SAMPLES: Final = 20
RUN_TIMEOUT_S: Final = 3600
INSTALL_TIMEOUT_S: Final = 1800
KV_CACHE: Final = ["--serve.engine.kv_cache_bytes", str(256 << 20)]
COUNTS: Final = "SELECT (SELECT count(*) FROM interactions) AS i, (SELECT count(*) FROM feedback) AS f"

LM_EVAL_TASK: Final = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
{fields}
metadata: {{version: 1.0}}
"""
LM_EVAL_TASKS: Final = {
    "sums_choice": (
        "multiple_choice",
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]",
    ),
    "sums_generate": (
        "generate_until",
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{choices[0]}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false, temperature: 0.0}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]",
    ),
    "sums_perplexity": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{question}} {{choices[0]}}."\n'
        "metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]",
    ),
}
INSPECT_TASK: Final = """
import json, pathlib

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sums():
    rows = map(json.loads, (pathlib.Path(__file__).parent / "sums.jsonl").read_text().splitlines())
    samples = [Sample(input=row["question"], target=row["choices"][0][-1]) for row in rows]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""
TASKS: Final = {"lm-eval": ",".join(LM_EVAL_TASKS), "inspect": "sums.py@sums"}
ARGUMENTS: Final = {"lm-eval": [], "inspect": ["--", "--temperature", "0", "--max-tokens", "64"]}


def write_tasks(folder: Path) -> None:
    """Tasks of both harnesses on sums, which need no network."""
    sums = [(a, b) for a in range(8) for b in range(5)]
    rows = [
        {"question": f"{a} plus {b} is", "choices": [f" {a + b}", f" {a + b + 1}", f" {a + b + 10}"]} for a, b in sums
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, fields) in LM_EVAL_TASKS.items():
        (folder / f"{name}.yaml").write_text(LM_EVAL_TASK.format(name=name, data=data, kind=kind, fields=fields))
    (folder / "sums.py").write_text(INSPECT_TASK)


def environment(name: str, home: Path, given: Path | None) -> list[str]:
    """The setting of a harness's environment: the one given, or one in runs/, made as the product says."""
    folder = given or Path("runs") / name
    setting = [f"--evaluation.harness.{name.replace('-', '_')}", str(folder.absolute())]
    if not folder.exists():
        command = [MILLRACE, "evaluate", "--harness", name, "--tasks", "any", "--home", str(home), *setting]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        [make] = [line for line in refused.stderr.splitlines() if " -m venv " in line]
        make = make.removeprefix("error:").strip()
        print(f"installing {name} as the error says: {make}", flush=True)
        subprocess.run(make, shell=True, check=True, timeout=INSTALL_TIMEOUT_S)
    return setting


def evaluate(name: str, settings: list[str], folder: Path, *options: str) -> dict[str, float]:
    """Run a harness by the product; its metrics by task and name."""
    result = folder / f"{name}.json"
    command = [MILLRACE, "evaluate", "--harness", name, "--tasks", TASKS[name], "--limit", str(SAMPLES), *settings]
    command += ["--include-path", str(folder / "tasks")] if name == "lm-eval" else []
    command += ["--json-out", str(result), *options, *ARGUMENTS[name]]
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S, cwd=folder / "tasks", env=variables)
    found = json.loads(result.read_text())
    return {f"{metric['task']} {metric['metric']}": metric["value"] for metric in found["metrics"]}


def on_vllm(policy: Path, python: Path, folder: Path) -> dict[str, float]:
    """lm-eval as its own users run it, on vLLM's own server of a policy's folder."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--distributed-executor-backend", "uni"]
    command += ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(256 << 20)]
    with Server(command, port, folder / "vllm.log", ready="/health") as server:
        arguments = {
            "base_url": f"{server.url}/v1/completions",
            "model": "policy",
            "tokenizer": str(policy),
            "max_length": CONTEXT,
            "num_concurrent": 16,
        }
        subprocess.run(
            [
                *(str(python), "-m", "lm_eval", "run", "--model", "local-completions"),
                *("--model_args", json.dumps(arguments), "--tasks", TASKS["lm-eval"], "--limit", str(SAMPLES)),
                *("--include_path", str(folder / "tasks"), "--output_path", str(folder / "on-vllm")),
            ],
            check=True,
            timeout=RUN_TIMEOUT_S,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    [file] = (folder / "on-vllm").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {
        f"{task} {key.removesuffix(',none')}": value
        for task, values in results.items()
        for key, value in values.items()
        if key.endswith(",none") and "_stderr" not in key
    }


def recorded(home: Path) -> dict[str, int]:
    """How many interactions and feedbacks journal and lake have."""
    [row] = json.loads(run("lake", "sql", COUNTS, "--format", "json", "--home", str(home)))
    return {"interactions": row["i"], "feedback": row["f"]}


def require_equal(what: str, one: Any, other: Any) -> None:
    if one != other:
        raise SystemExit(f"{what}: {one} is not {other}")


def require_alike(what: str, found: dict[str, dict[str, float]]) -> None:
    """Raises SystemExit unless all servers' answers scored alike: the same but for rounding."""
    first = next(iter(found.values()))
    for server, metrics in found.items():
        if metrics.keys() != first.keys() or any(abs(metrics[name] - first[name]) > 1e-4 for name in first):
            raise SystemExit(f"{what} on {server}: {metrics}, and on {next(iter(found))}: {first}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", type=Path, help="an environment that has lm-eval; else runs/lm-eval")
    parser.add_argument("--inspect", type=Path, help="an environment that has Inspect; else runs/inspect")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="harness-", dir=runs) as place:
        folder = Path(place)
        home, tasks, port = folder / "home", folder / "tasks", free_port()
        tasks.mkdir()
        write_tasks(tasks)
        model = make_model_folder(folder / "model", 1, context=CONTEXT)
        here = ["--home", str(home), "--serve.port", str(port), *KV_CACHE]
        run("init", "--model", str(model), *here, folder=folder)
        settings = {
            "lm-eval": [*here, *environment("lm-eval", home, options.lm_eval)],
            "inspect": [*here, *environment("inspect", home, options.inspect)],
        }
        key = json.loads(run("keys", "create", "--name", "app", "--json", "--home", str(home)))["secret"]
        found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in settings}
        with Server([MILLRACE, "serve", *here], port, folder / "serve.log") as server:
            for name in settings:
                found[name]["endpoint"] = evaluate(name, settings[name], folder, "--endpoint")
            require_equal("recorded of the harnesses", recorded(home), {"interactions": 0, "feedback": 0})
            body = json.dumps({"prompt": "hello", "max_tokens": 4}).encode()
            headers = {"Content-Type": "application/json", "X-API-Key": key}
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/generate", body, headers), timeout=60).close()
        for name in settings:
            found[name]["own server"] = evaluate(name, settings[name], folder)
        require_equal("recorded in all", recorded(home), {"interactions": 1, "feedback": 0})
        python = Path(settings["lm-eval"][-1]) / "bin" / "python"
        found["lm-eval"]["vLLM's own server"] = on_vllm(home / "policies" / "v000001", python, folder)
        for name, metrics in found.items():
            require_alike(name, metrics)
        listed = json.loads(run("evaluate", "--harness-results", "--json", "--home", str(home)))
        require_equal("runs that are listed", len(listed), 4)
        run("report", "--home", str(home))
        in_report = "Other harnesses" in (home / "report.html").read_text()
        require_equal("results in the report", in_report, True)
        active = [
            one for one in json.loads(run("keys", "list", "--json", "--home", str(home))) if one["state"] == "active"
        ]
        require_equal("active keys", [one["name"] for one in active], ["app"])
    seconds = {f"{one['harness']} {one['server']}": one["seconds"] for one in listed}
    print(json.dumps({"metrics": found, "recorded_of_harnesses": 0, "seconds": seconds}))


if __name__ == "__main__":
    main()
