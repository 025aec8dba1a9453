"""From FSDP shards to a Hugging Face folder, written by all ranks.

Read ``model_folder`` (which rank gathers and writes what, and when the folder is whole), then ``collect`` (a sharded
tensor whole on one rank) and ``safetensors_writer`` (a file, hashed as it is written).

``piecewise`` (a policy in float32 for which memory has no room, a module at a time).
"""
