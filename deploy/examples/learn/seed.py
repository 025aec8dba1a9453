"""Make the seed policy that every algorithm starts from: ``python -m deploy.examples.learn.seed FOLDER``.

A small Qwen3 that is trained from scratch on the task's corpus, in seconds and on one thread: always the same.
"""

from __future__ import annotations

from pathlib import Path

import click

from deploy.examples.demo.seed import make_policy
from deploy.examples.learn.task import TASK_SEED, corpus


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Train the seed policy and write it to FOLDER."""
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    make_policy(folder, corpus(), seed=TASK_SEED, threads=1, steps=600, batch=32, learning_rate=5e-3, **shape)


if __name__ == "__main__":
    main()
