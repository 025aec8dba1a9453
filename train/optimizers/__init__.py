"""What changes the weights.

Read ``build`` (the settings' optimizer over a sharded model, its groups of parameters) with ``muon`` (matrices by Muon,
all else by AdamW), then ``schedule`` (the learning rate from step to step).
"""
