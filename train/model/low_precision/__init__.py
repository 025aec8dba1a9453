"""Fewer bits in training, by torchao: ``float8`` (linear layers that multiply in fp8) and ``nf4`` (frozen weights of
4 bits under adapters).
"""
