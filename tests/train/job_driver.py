"""Runs training jobs one after the other in one Ray: ``python job_driver.py JOBS.json``, a list of {config, context}.

Its results are printed as lines of JSON. A process of its own, because tests kill it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray

from train.config.training import TrainConfig
from train.job import JobContext, run


def main(file: Path) -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path)}},
    )
    for job in json.loads(file.read_text()):
        result = run(TrainConfig.model_validate(job["config"]), JobContext.model_validate(job["context"]))
        print("RESULT", result.model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
