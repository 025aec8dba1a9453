"""What shows and measures the product: the demo, the proof that the algorithms learn, benches of single parts.

They import the product and are never imported by it; the command line finds their commands by name.
"""
