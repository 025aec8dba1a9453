"""The SPMD workers, one class each."""
