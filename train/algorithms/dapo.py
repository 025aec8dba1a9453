"""DAPO: decoupled clip and dynamic sampling policy optimisation (arXiv 2503.14476).

GRPO with four changes, each a setting whose default is the paper's:

- clip-higher: the upper bound of the ratio is further off than the lower one, so that unlikely tokens can become likely
  (``clip_low`` 0.2, ``clip_high`` 0.28);
- dynamic sampling: prompts whose responses all have one reward are replaced by others (``resample_rounds``);
- a loss by tokens, so that those of long responses count as much (``aggregation`` token_mean);
- overlong reward shaping: length costs reward in the last fifth of what is allowed (``overlong_buffer``).
"""

from __future__ import annotations

from train.algorithms.grpo import GRPO


class DAPO(GRPO):
    """What it does otherwise than GRPO, it does by its defaults: ``train.config.algorithms.DEFAULTS``."""
