"""How a run goes on after it was ended, and whether it may.

``resume`` (a run begins, continues, or was finished) with ``resume_settings`` (which settings must then be the same),
``failure`` (why an attempt failed, and whether another one may not), ``restarts`` (those of a run, on record),
``unfinished`` (runs at work or killed), ``erasures`` (rows that were erased while a run trained), ``run_store`` (runs
in an object store, for machines without a shared disk).
"""
