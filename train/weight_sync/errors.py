"""What resharding raises."""


class ReshardError(RuntimeError):
    """The weights could not be resharded; the text names the tensor and the layer."""
