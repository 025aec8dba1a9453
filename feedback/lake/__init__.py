"""The Delta tables, on a local disk or an object store.

Read ``tables`` (create, append, replace, read), then ``data_files`` (Parquet files, durable before a commit names
them), ``delta_log`` (the log: made durable, without torn commits and what must be forgotten), ``table_changes`` (which
files each commit added and removed), ``upgrade`` (tables of an older Millrace become this one's), ``views`` (DuckDB
over tables and journal), ``open_lake`` (a lake that is read again and again) and ``erasure_registry`` (what was erased,
and must not come back). ``query`` (SQL that people write, and that can only read), ``statistics`` (the numbers of `lake
stats`).
"""
