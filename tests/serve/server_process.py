"""A server of a test: ``python server_process.py SETTINGS``, a JSON of {serve, feedback}."""

from __future__ import annotations

import json
import sys

from feedback.config import FeedbackConfig
from serve.config import ServeConfig


def main(settings: str) -> None:
    read = json.loads(settings)
    config = ServeConfig(**read["serve"])
    if config.fleet.is_one:
        from serve.app import run
    else:
        from serve.fleet.deployment import run
    run(config, FeedbackConfig(**read["feedback"]))


if __name__ == "__main__":
    main(sys.argv[1])
