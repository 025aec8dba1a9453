"""A policy's model as a user changes it: ``model_class`` (a class of the user's own), ``overrides`` (of its config)."""
