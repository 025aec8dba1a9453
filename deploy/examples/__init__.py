"""What shows and measures the product: ``demo`` (the whole loop on this machine), ``learn`` (the proof that the
algorithms learn), ``agent`` (a task of two turns with a tool, which GRPO learns), ``simulate`` (the proof that
decisions keep their error rates), ``live`` (the proof that experiments keep their promises on real traffic), ``bench``
(rates and memory of single parts); ``stages`` (progress of long work, for all of them).

They import the product and are never imported by it; the command line finds their commands by name.
"""
