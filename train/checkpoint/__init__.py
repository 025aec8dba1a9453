"""What a killed run continues from: ``folders`` (a checkpoint is made whole by a rename; which are, which is the last,
what goes), ``dcp`` (a model with its optimizer, sharded, written in the background), ``random_state`` (random number
generators as JSON). When to save is in ``train.run.checkpoints``, whether to continue in ``train.run.recovery.resume``.
"""
