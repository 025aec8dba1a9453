"""Packed batches: ``packed`` (flat tokens and offsets, never padding), ``packing`` (which sequences go together, to a
rank and into a micro-batch), ``prompt_rows`` (a prompt that several responses share is computed once).
"""
