"""The Delta tables, on a local disk or an object store.

Read ``tables`` (create, append, replace, read), then ``data_files`` and ``delta_log`` (what is durable when),
``table_changes`` (which commits added what), ``views`` (DuckDB over all of it) and ``erasure_registry`` (what must not
come back). ``query`` is SQL that people write; ``statistics`` is ``lake stats``.
"""
