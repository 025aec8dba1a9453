"""The proof that experiments keep their promises in the real loop: a real server, or fleet, and the demo's users.

Read ``__main__`` (all trials, and what came of them), ``home`` (the policies, copies and spoiled ones, and what
serves), ``trial`` (one experiment, and the controller's death in it), ``counts`` (what the users were acknowledged
against the rows of the lake, and the figures' bars).
"""
