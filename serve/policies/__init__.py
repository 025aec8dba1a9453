"""Policies, and the pointer to the one that serves.

Read ``store`` (publishes, finds and verifies versions), then ``pointer`` (which policy serves, every move, and what
came of it), ``folder`` (what a policy's folder holds), ``adapter_files`` (the folder of one that is an adapter beside
another one's weights), ``whole_policies`` (the one model that those two make), ``records`` (the JSON files beside the
weights), ``probe`` (the numbers by which a server proves that it serves what was trained), ``retention`` (which
versions keep their weights, and which ancestor training starts from after an erasure), ``experiments`` (two policies
that share live traffic), ``mapped_safetensors`` (weights read without a copy). Machines without a shared disk:
``shared`` (the store in an object store, and this machine's copy), ``shared_records`` (the one object with its
records), ``object_store`` (the client), ``open_store`` (which of the two it is).
"""
