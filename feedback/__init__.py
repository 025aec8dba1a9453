"""What happened: interactions and feedback are recorded, kept and scored. Imports no torch, vLLM or Ray.

Read ``schema`` (the three tables) first, then follow a row: ``journal`` (durable on this machine), ``ingest`` (into the
lake), ``lake`` (the Delta tables and how they are read), ``scoring`` (rewards), ``datasets`` (training data).
``maintenance`` compacts, retains and erases. ``files`` is the only place that writes atomically, fsyncs or locks.
"""
