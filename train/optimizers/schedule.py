"""The learning rate from one optimizer step to the next, as a share of its peak."""

from __future__ import annotations

import math

from train.config.sections import OptimizerConfig


def share_of_peak(step: int, config: OptimizerConfig, updates: int) -> float:
    """Of the step with this number, from 0; ``updates``: of the whole run.

    Linear warm-up: step s of w has (s + 1)/(w + 1). Then constant; or from 1 down to ``final_learning_rate`` at the
    last step, along a line, or half a cosine (SGDR, arXiv 1608.03983, equation 5, without restarts).

    >>> [share_of_peak(s, OptimizerConfig(warmup_steps=1, schedule="linear"), 4) for s in range(4)]
    [0.5, 1.0, 0.5, 0.0]
    """
    warmup, final = config.warmup_steps, config.final_learning_rate
    if step < warmup or config.schedule == "constant":
        return min(1.0, (step + 1) / (warmup + 1))
    done = min(1.0, (step - warmup) / max(1, updates - 1 - warmup))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return final + (1 - final) * left
