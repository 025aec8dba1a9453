"""Sets that `millrace data export` wrote, loaded by `datasets` and trained on by TRL, a step each, unchanged.

python trl_sets.py MODEL FOLDER; run by a Python that has TRL, for ``loadtests.trl_round_trip``. The last line printed
is JSON: of each file the rows, and the loss of the step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "trl-preference": (DPOTrainer, DPOConfig, {}),
    "trl-kto": (KTOTrainer, KTOConfig, {}),
    "trl-sft": (SFTTrainer, SFTConfig, {}),
    "prompts": (GRPOTrainer, GRPOConfig, {"num_generations": 2, "max_completion_length": 8}),
}


def lengths(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(2)
    steps = {}
    for file in sorted(folder.glob("*.*")):
        form = file.name.partition(".")[0]
        trainer, config, more = TRAINERS[form]
        loader = "json" if file.suffix == ".jsonl" else "parquet"
        rows = load_dataset(loader, data_files=str(file), split="train", cache_dir=str(folder / "cache"))
        trained = trainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=rows,
            args=config(
                output_dir=str(folder / "trained"),
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=4,
                max_steps=1,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                **more,
            ),
            **({"reward_funcs": lengths} if form == "prompts" else {}),
        ).train()
        steps[file.name] = {"trainer": trainer.__name__, "rows": len(rows), "loss": trained.training_loss}
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
