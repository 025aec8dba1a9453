"""What of a model in training waits in the host's memory while its device is needed for something else.

Read ``parked`` (tensors whose memory is given back for a while) and ``parking_worker`` (a worker of which a model and
an optimizer's state are such, until its next call).
"""
