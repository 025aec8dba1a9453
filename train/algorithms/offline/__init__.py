"""Algorithms that learn from feedback and sample nothing: ``dpo``, ``kto``, ``sft``, ``reward_model``."""
