"""Make a task's seed policy: ``python -m deploy.examples.agent.seed FOLDER``. Always the same, on one thread."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Final

import click
from transformers import PreTrainedTokenizerFast

from deploy.examples.agent import code, task
from deploy.examples.demo.seed import make_policy, make_tokenizer

TASKS: Final = {"tool": task, "code": code}
"""By name, the module of each."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(list(TASKS)), default="tool", show_default=True)
def main(folder: Path, task: str) -> None:
    """Train a task's seed policy and write it to FOLDER."""
    make_seed(folder, of=TASKS[task])


def make_seed(folder: Path, *, of: ModuleType = task, steps: int = 700, batch: int = 64) -> None:
    shape = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}
    how: dict[str, Any] = {"steps": steps, "batch": batch, "learning_rate": 5e-3, **shape}
    make_policy(folder, of.corpus(), seed=0, threads=1, tokenizer=make_tokenizer_of(of), **how)


def make_tokenizer_of(of: ModuleType) -> PreTrainedTokenizerFast:
    """One token a character, and one for who speaks."""
    tokenizer = make_tokenizer(of.ALPHABET, of.TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [task.USER, task.ASSISTANT, task.TOOL]})
    return tokenizer


if __name__ == "__main__":
    main()
