"""Settings of computing in fp8, and where that can be had. Imports no torch."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, model_validator

from feedback.settings_base import Section

CAPABILITY: Final = (8, 9)
"""Compute capability from which on NVIDIA's GPUs multiply in fp8: Ada, Hopper and later."""


class Fp8Config(Section):
    """Multiplying in fp8, 8-bit floats with scales, in the linear layers of the models' bodies."""

    training: Literal["rowwise", "tensorwise"] | None = Field(
        None,
        description="Train in fp8, by torchao. rowwise: a scale for each token and each output, so that no token's "
        "result depends on others. tensorwise: one for all, which is faster and coarser. If unset, in train.dtype. "
        "Master weights stay float32.",
    )
    keep: list[str] = Field(
        [],
        description="Linear layers that training leaves in train.dtype, by the last part of their names, for example "
        "down_proj. Routers, and layers whose sizes are no multiples of 16, always are.",
    )
    rollout: Literal["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"] | None = Field(
        None,
        description="Generate in fp8, by vLLM's quantization of this name. fp8_per_channel has a scale for each token "
        "and each output, as training's rowwise.",
    )
    emulate: bool = Field(
        False,
        description="Where the device has no fp8, compute the numbers that it would give, slowly, to try it out; "
        "otherwise refused there.",
    )

    @model_validator(mode="after")
    def _is_of_use(self) -> Fp8Config:
        if self.training is None and self.rollout is None:
            raise ValueError("train.fp8 has neither training nor rollout; set one of them, or train.fp8 to null")
        if self.keep and self.training is None:
            raise ValueError(f"train.fp8.keep={self.keep} is of train.fp8.training, which is unset; set it")
        return self

    @property
    def asked_for(self) -> str:
        """The settings that have something computed in fp8."""
        names = {"train.fp8.training": self.training, "train.fp8.rollout": self.rollout}
        return " and ".join(f"{name}={value}" for name, value in names.items() if value is not None)


def fp8_unsupported(fp8: Fp8Config | None, device: str, capability: tuple[int, int] | None) -> str | None:
    """Why a device can't compute by these settings; None if it can.

    Args:
        device: what messages call it.
        capability: a GPU's compute capability; None: it is a CPU.
    """
    if fp8 is None or (capability is not None and capability >= CAPABILITY):
        return None
    if not fp8.emulate:
        least = ".".join(map(str, CAPABILITY))
        return (
            f"{fp8.asked_for}: {device} does not multiply in fp8, which a GPU of compute capability {least} or later "
            "does; set train.fp8 to null, or train.fp8.emulate=true to try it out, slowly"
        )
    if capability is None and fp8.rollout not in (None, "fp8_per_channel"):
        return (
            f"train.fp8.rollout={fp8.rollout}: vLLM's build for CPUs can't compute it, with train.fp8.emulate either; "
            "set it to fp8_per_channel"
        )
    return None
