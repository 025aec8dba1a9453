"""Supervised learning on a part of the responses that were sampled.

``best_of_n`` (the best of each prompt's), ``rejection_sampling`` (those that are good enough).
"""
