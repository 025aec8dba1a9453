"""The demo: a seed policy trained here, simulated users, and the whole loop turning on this machine.

Read ``command`` (the command demo), ``run`` (the demo from beginning to end), ``task`` (what the users ask, and the
habit that spoils half of it), ``seed`` (trains the seed policy), ``summary`` (what came of it, counted from two sides).
"""

from typing import Final

SEED: Final = 7
"""Of prompts, model, users and training, unless another is named."""
