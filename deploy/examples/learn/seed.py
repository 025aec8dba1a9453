"""Make the seed policy that every algorithm starts from: ``python -m deploy.examples.learn.seed FOLDER``.

A small Qwen3 that is trained from scratch on the task's corpus, in seconds and on one thread: always the same.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from deploy.examples.demo.seed import make_model, make_tokenizer, train
from deploy.examples.learn.task import TASK_SEED, corpus

STEPS, BATCH, LEARNING_RATE = 600, 32, 5e-3
SHAPE = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def main(folder: Path) -> None:
    """Train the seed policy and write it to FOLDER."""
    torch.manual_seed(TASK_SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, **SHAPE)
    print(f"seed policy: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    train(model, tokenizer, corpus(), steps=STEPS, batch=BATCH, learning_rate=LEARNING_RATE)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
