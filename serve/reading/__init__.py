"""What a server reads of the lake and of files while it serves, in child processes.

Read ``reader`` (a child that answers one question after the other), then ``sessions`` (which responses a session has,
for feedback on it) and ``session_worker`` (what runs in its child).
"""
