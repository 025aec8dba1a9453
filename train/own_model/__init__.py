"""A policy's model as a user changes it.

``model_class`` (a class of the user's own, and what a process needs before it reads a policy), ``overrides`` (changes
to the config, held against the weights), ``separation`` (whether such a model keeps the sequences of a batch apart) and
``trial`` (a look before a start).
"""
