"""Policies on disk, and the pointer to the one that serves.

Read ``store`` first, then ``pointer`` (which policy serves, and every move), ``folder`` (what a policy's folder holds),
``probe`` (the numbers by which a server proves that it serves what was trained), ``records`` (the JSON files beside the
weights) and ``mapped_safetensors`` (weights read without a copy).
"""
