"""Make the seed policy that every algorithm starts from: ``python -m deploy.examples.learn.seed FOLDER``; or the judge.

A small Qwen3 that is trained from scratch on the task's corpus, in seconds and on one thread: always the same.
"""

from __future__ import annotations

from pathlib import Path

import click

from deploy.examples.demo.seed import make_policy, make_tokenizer
from deploy.examples.demo.task import ALPHABET
from deploy.examples.learn.task import ASK, TASK_SEED, corpus, verdicts

JUDGES_TEMPLATE = "{{ messages[-1]['content'].split('\\n')[0] }}"
"""It reads the question, and not in which form it is to answer: it knows one."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--judge", is_flag=True, help="Train the judge in place of it.")
def main(folder: Path, judge: bool) -> None:
    """Train the seed policy and write it to FOLDER."""
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    if judge:
        tokenizer, how = make_tokenizer(f"{ALPHABET}01{ASK}", JUDGES_TEMPLATE), {"steps": 800, "batch": 64, **shape}
        make_policy(folder, verdicts(), seed=0, threads=1, learning_rate=5e-3, tokenizer=tokenizer, **how)
    else:
        make_policy(folder, corpus(), seed=TASK_SEED, threads=1, steps=600, batch=32, learning_rate=5e-3, **shape)


if __name__ == "__main__":
    main()
