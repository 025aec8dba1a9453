"""Algorithms that learn from feedback and sample nothing: ``sft`` (from demonstrations), ``dpo`` (from pairs; also IPO
and cDPO), ``kto`` (from thumbs), ``reward_model`` (a score per response, from pairs and votes).
"""
