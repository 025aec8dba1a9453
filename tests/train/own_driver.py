"""Runs training jobs one after the other in one rank, without Ray: ``python own_driver.py JOBS.json``.

JOBS.json is a list of {config, context}; the results are printed as lines of JSON. An error ends it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from train.config.training import TrainConfig
from train.context import JobContext
from train.controller import torchrun
from train.controller.dispatch import Layout
from train.controller.role_groups import environment
from train.job import run


def main(file: Path) -> None:
    jobs = [
        (TrainConfig.model_validate(job["config"]), JobContext.model_validate(job["context"]))
        for job in json.loads(file.read_text())
    ]

    def drive() -> None:
        for config, context in jobs:
            print("RESULT", run(config, context).model_dump_json(), flush=True)

    torchrun.be_rank(jobs[0][0], Layout(1), environment(jobs[0][0]), drive)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
