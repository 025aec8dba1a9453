"""What single parts do on this machine and this disk: rates, latencies, bytes.

``command`` (the command bench), ``data_plane`` (the journal, the lake, scoring and the server's front end),
``training`` (weight sync, memory, the plan, and runs of several kinds).
"""
