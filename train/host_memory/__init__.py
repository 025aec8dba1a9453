"""The host's memory: what waits there while its device is needed for something else, and what a rank on a CPU frees.

Read ``parked`` (tensors whose memory is given back for a while) and ``parking_worker`` (a worker of which a model and
an optimizer's state are such, until its next call); ``allocator`` (freed memory stays with its process, or goes back).
"""
