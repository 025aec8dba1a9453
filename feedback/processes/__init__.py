"""How processes begin, end and reach each other, in every package.

``signals`` (signals that are another process's to handle), ``exit`` (how a process ends: with its parent, without
teardown), ``fork_server`` (processes that are forked from one that has imported what they need), ``resident_socket``
(how a stage reaches workers that stay between cycles), ``freed_memory`` (what a process frees stays with it, or goes
back to the system).
"""
