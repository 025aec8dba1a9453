"""TRL's GRPO on the task of ``loadtests.words``, for ``loadtests.bench_learn``; run by a Python that has TRL.

python trl_words.py MODEL FOLDER '{"samples_per_step": 64, "every": 128, "threads": 2, "learning_rate": 1e-3}'

What the settings have beside the first three is of ``GRPOConfig``. It goes on until it is stopped.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import words
from datasets import Dataset
from learning_curve import Curve
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Evaluated(TrainerCallback):
    """Measures the policy each ``every`` samples, once all updates by them are made, and before the first one."""

    def __init__(self, tokenizer: Any, every: int) -> None:
        self.tokenizer, self.every = tokenizer, every
        self.sampled = 0
        self.prompts = words.held_out()
        self.ids = torch.tensor(tokenizer(self.prompts).input_ids)  # all are of one length

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        self.sampled += len(completions)
        return [float(words.is_right(*pair)) for pair in zip(prompts, completions, strict=True)]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.curve, began = Curve(), time.monotonic()
        self.curve.step(0, self.accuracy(model), time.monotonic() - began)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % (args.steps_per_generation * args.num_iterations) > 0:
            return
        began, accuracy = time.monotonic(), None
        if self.sampled % self.every == 0:
            accuracy = self.accuracy(model)
        self.curve.step(self.sampled, accuracy, time.monotonic() - began)

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """The share of held-out prompts whose greedy response is right."""
        was_training = model.training
        model.eval()
        ids = model.generate(
            input_ids=self.ids,
            attention_mask=torch.ones_like(self.ids),
            do_sample=False,
            max_new_tokens=words.MAX_TOKENS,
        )
        model.train(was_training)
        responses = self.tokenizer.batch_decode(ids[:, self.ids.shape[1] :], skip_special_tokens=True)
        right = [words.is_right(*pair) for pair in zip(self.prompts, responses, strict=True)]
        return sum(right) / len(right)


def main() -> None:
    model, folder, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    samples, every = settings.pop("samples_per_step"), settings.pop("every")
    torch.set_num_threads(settings.pop("threads"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    evaluated = Evaluated(tokenizer, every)
    minibatches = settings.get("steps_per_generation", 1)

    def reward(**columns: Any) -> list[float]:
        return evaluated.reward(**columns)

    how = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": samples // minibatches,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": minibatches,
        "num_generations": 8,
        "max_completion_length": words.MAX_TOKENS,
        "temperature": 1.0,
        "max_steps": 100_000,
        "beta": 0.0,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": words.trained_on()}),
        args=GRPOConfig(**(how | settings)),
        callbacks=[evaluated],
    ).train()


if __name__ == "__main__":
    main()
