"""The commands of ``millrace``, one file a family. What is heavy is imported when a command runs."""
