"""The UK AI Security Institute's Inspect, by its provider ``openai-api``: chats, by ``/v1/chat/completions``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Final

from evaluation.harness.results import HarnessFailed, Metric, number
from evaluation.harness.run import Endpoint, HarnessRequest

_STDERR: Final = "stderr"
_MEANS: Final = ("accuracy", "mean")  # the metrics that Inspect's stderr is of


class Inspect:
    """inspect-ai."""

    name: ClassVar[str] = "inspect"
    distribution: ClassVar[str] = "inspect_ai"
    requirements: ClassVar[tuple[str, ...]] = ("inspect-ai==0.3.285", "openai")

    def check(self, request: HarnessRequest) -> None:
        if request.include_path is not None:
            raise ValueError(
                "--include-path is lm-eval's: to Inspect a task of yours is a file, such as my_task.py@name"
            )

    def command(self, request: HarnessRequest, endpoint: Endpoint, output: Path) -> list[str]:
        command = ["-m", "inspect_ai", "eval", *request.tasks, "--model", f"openai-api/millrace/{endpoint.model}"]
        for argument in request.model_args.split(",") if request.model_args else ():
            command += ["-M", argument]
        command += ["--limit", request.limit] if request.limit else []
        return [*command, "--log-dir", str(output), "--log-format", "json", "--display", "plain", *request.arguments]

    def environment(self, endpoint: Endpoint) -> dict[str, str]:
        return {"MILLRACE_API_KEY": endpoint.key, "MILLRACE_BASE_URL": f"{endpoint.url}/v1"}

    def metrics(self, output: Path) -> tuple[Metric, ...]:
        logs = [json.loads(path.read_bytes()) for path in sorted(output.glob("*.json"))]
        if not logs:
            raise HarnessFailed(f"Inspect left no log in {output}")
        for log in logs:
            if log["status"] != "success":
                why = (log.get("error") or {}).get("message", "its log does not say why")
                raise HarnessFailed(f"Inspect's task {log['eval']['task']} ended as {log['status']}: {why}")
        return tuple(metric for log in logs for score in log["results"]["scores"] for metric in _metrics_of(log, score))


def _metrics_of(log: dict[str, Any], score: dict[str, Any]) -> list[Metric]:
    """The metrics of one scorer, or of one of the values that it gives."""
    values = {name: number(metric["value"]) for name, metric in score["metrics"].items()}
    return [
        Metric(
            task=log["eval"]["task"],
            metric=f"{score['name']} {name}",
            value=value,
            stderr=values.get(_STDERR) if name in _MEANS else None,
            n=score.get("scored_samples"),
        )
        for name, value in values.items()
        if name != _STDERR and value is not None
    ]
