"""The proof that rewards of environments are learned from: a tool over two turns, and code that passes unit tests.

Read ``__main__`` (makes a task's seed policy, trains it with GRPO, and prints what came of it), ``task`` (a word is to
be looked up with a tool, and what was found said), ``code`` (a function that is described is to be written; unit tests
in the sandbox judge it) and ``seed`` (trains the seed policies).
"""
