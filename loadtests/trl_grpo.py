"""TRL's GRPO on a CPU, a step a turn, for ``loadtests.bench_train``; run by a Python that has TRL.

python trl_grpo.py MODEL PROMPTS.json '{"bf16": true, "completions": 64, "group": 8, "tokens": 128, "steps": 5}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns, share_of_letters


class OneStepATurn(TrainerCallback):
    """Ends each optimizer step with a word to the benchmark."""

    def __init__(self) -> None:
        self.turns = Turns()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.turns.step_ended()


def reward(completions: list[str], **_: Any) -> list[float]:
    return share_of_letters(completions)


def main() -> None:
    model, prompts, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), json.loads(sys.argv[3])
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<eos>"  # TRL needs one; it is never drawn
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=str(Path(sys.argv[2]).parent / "trl"),
            use_cpu=True,
            bf16=settings["bf16"],
            per_device_train_batch_size=settings["completions"],
            gradient_accumulation_steps=1,
            num_generations=settings["group"],
            max_completion_length=settings["tokens"],
            generation_kwargs={"min_new_tokens": settings["tokens"]},  # as on the other side, nothing ends a response
            max_steps=settings["steps"],
            beta=0.0,  # no reference model
            learning_rate=1e-6,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        ),
        callbacks=[OneStepATurn()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
