"""What the data plane and the server cost, measured on ``rows`` (like real ones).

``capture`` (the journal in turns with its peers), ``peers`` (SQLite and the bare disk), ``storage`` (the lake, in turns
with deltalake's own writer), ``scoring`` (its rate as history grows), ``front_end`` (the cost of everything but the
engine).
"""
