"""What is added to rewards before advantages are made of them: pure functions."""

from __future__ import annotations

from torch import Tensor


def soft_overlong_punishment(
    lengths: Tensor, *, max_tokens: int, overlong_buffer: int, overlong_penalty: float
) -> Tensor:
    """What a long response costs (DAPO, arXiv 2503.14476, eq. 13).

    Nothing up to ``max_tokens - overlong_buffer`` tokens, from there on more with each token, and ``overlong_penalty``
    from ``max_tokens`` on. The paper has a buffer of a fifth of the length, and a penalty of 1; without a buffer
    nothing costs anything. Lengths, int [S] → float32 [S], from ``-overlong_penalty`` to 0, to be added to the rewards.
    """
    if overlong_buffer == 0:
        return lengths.float() * 0.0
    into_the_buffer = (lengths.float() - (max_tokens - overlong_buffer)).clamp(0, overlong_buffer)
    return -overlong_penalty * into_the_buffer / overlong_buffer
