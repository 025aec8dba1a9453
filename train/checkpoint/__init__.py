"""What a killed run goes on from: ``resume`` (begins, goes on, or was finished), ``writer`` (as the run goes),
``layout`` (its folders, and which are whole), ``dcp`` (sharded model and optimizer), ``random_state``.
"""
