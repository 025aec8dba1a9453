"""Low-rank adapters in an engine.

``slots`` (vLLM's slots for adapters, filled from tensors, and what a request names one by), ``cpu_products`` (their
products on a CPU).
"""
