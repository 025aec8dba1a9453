"""What a killed run continues from: ``folders`` (which are whole), ``dcp`` (sharded model and optimizer),
``random_state``. ``train.run`` says when.
"""
