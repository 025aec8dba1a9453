"""Policies on disk, and the pointer to the one that serves.

Read ``store`` first, then ``folder`` (what a policy's folder holds), ``probe`` (the numbers by which a server proves
that it serves what was trained) and ``mapped_safetensors`` (weights read without a copy).
"""
