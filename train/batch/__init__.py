"""Packed batches: ``packed`` (flat tokens and offsets, never padding), ``packing`` (which sequences go together),
``prompt_rows`` (a prompt that several responses share is computed once).
"""
