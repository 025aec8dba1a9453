"""What a killed run continues from: ``folders`` (which checkpoints are whole, which is the last, what goes), ``dcp`` (a
model with its optimizer, sharded, written in the background), ``random_state`` (random number generators as JSON). When
to save is in ``train.run.checkpoints``, whether to continue in ``train.run.resume``.
"""
