"""Runs jobs one after the other in this process, as its only rank: ``python single_rank_driver.py JOBS.json``.

The file is a list of {config, context}. Results, and the errors of hooks, are printed as lines.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from train.config.training import TrainConfig
from train.controller import torchrun
from train.controller.dispatch import Layout
from train.job import JobContext, run
from train.observe.hooks import HookError
from train.workers.role_groups import environment


def main(file: Path) -> None:
    jobs = json.loads(file.read_text())
    config = TrainConfig.model_validate(jobs[0]["config"])
    torchrun.run_rank(config, Layout(1), environment(config), partial(drive, jobs))


def drive(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        try:
            result = run(TrainConfig.model_validate(job["config"]), JobContext.model_validate(job["context"]))
        except HookError as error:
            print("STOPPED", error, flush=True)
        else:
            print("RESULT", result.model_dump_json(), flush=True)
    print("IMPORTED", *(name for name in ("vllm", "ray") if name in sys.modules), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
