"""What resharding raises."""


class ReshardError(RuntimeError):
    """The weights could not be handed over; the text names the tensor and the layer."""
