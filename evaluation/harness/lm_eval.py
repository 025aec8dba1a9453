"""EleutherAI's lm-evaluation-harness, by its model ``local-completions``.

It tokenises with the policy's own tokenizer and sends token ids: a choice's log-likelihood is read from the ``echo`` of
prompt and choice with ``logprobs``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Final

from evaluation.harness.results import HarnessFailed, Metric, number
from evaluation.harness.run import Endpoint, HarnessRequest

_CONCURRENT: Final = 16
_STDERR: Final = "_stderr"


class LmEval:
    """lm-eval, version 0.4.9 or later."""

    name: ClassVar[str] = "lm-eval"
    distribution: ClassVar[str] = "lm_eval"
    # transformers, without torch, for the tokenizer.
    requirements: ClassVar[tuple[str, ...]] = ("lm-eval[api]==0.4.13", "transformers")

    def check(self, request: HarnessRequest) -> None:
        if request.include_path is not None and not request.include_path.is_dir():
            raise ValueError(f"there is no folder {request.include_path} to take tasks from")

    def command(self, request: HarnessRequest, endpoint: Endpoint, output: Path) -> list[str]:
        model_args = {
            "base_url": f"{endpoint.url}/v1/completions",
            "model": endpoint.model,
            "tokenizer": str(endpoint.folder),
            "tokenizer_backend": "huggingface",
            "max_length": endpoint.context,
            "num_concurrent": _CONCURRENT,
        }
        command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", json.dumps(model_args)]
        command += ["--model_args", request.model_args] if request.model_args else []
        command += ["--tasks", ",".join(request.tasks), "--output_path", str(output), "--log_samples"]
        command += ["--include_path", str(request.include_path)] if request.include_path else []
        command += ["--limit", request.limit] if request.limit else []
        return [*command, *request.arguments]

    def environment(self, endpoint: Endpoint) -> dict[str, str]:
        return {"OPENAI_API_KEY": endpoint.key}

    def metrics(self, output: Path) -> tuple[Metric, ...]:
        files = sorted(output.rglob("results_*.json"))
        if not files:
            raise HarnessFailed(f"lm-eval left no results_*.json in {output}")
        found = json.loads(files[-1].read_bytes())
        metrics = [metric for task, values in found["results"].items() for metric in _metrics_of(task, values)]
        if not metrics:
            raise HarnessFailed(f"{files[-1]} has no metric")
        return tuple(metrics)


def _metrics_of(task: str, values: dict[str, Any]) -> list[Metric]:
    """The metrics of a task, or of a group of them.

    ``acc,none`` is acc, and ``exact_match,strict`` exact_match (strict): behind the comma stands the filter of answers.
    A group's metric is of those of its tasks that have it.
    """
    counts, found = values.get("sample_count", {}), []
    for key, value in values.items():
        name, comma, by = key.partition(",")
        measured = number(value)
        if not comma or name.endswith(_STDERR) or measured is None:
            continue
        stderr = number(values.get(f"{name}{_STDERR},{by}"))
        shown = name if by == "none" else f"{name} ({by})"
        n = counts.get(key, values.get("sample_len"))
        found.append(Metric(task=task, metric=shown, value=measured, stderr=stderr, n=n))
    return found
