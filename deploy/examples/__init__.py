"""What shows and measures the product: the demo, the proofs that the algorithms learn and that decisions keep their
error rates, benches of single parts.

They import the product and are never imported by it; the command line finds their commands by name.
"""
