"""Which distribution a recorded response was sampled from, by the request's parameters that its row has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

RESERVED: Final = "millrace:"
"""What names of metadata begin with that are not a client's."""
SAMPLING_KEY: Final = f"{RESERVED}sampling"
"""The key of a row's metadata for parameters that the column ``sampling`` has no place for, as JSON."""

STOP_TOKEN_IDS: Final = "stop_token_ids"
"""The one among them that ends a response and changes no probability."""


def other_parameters(metadata: Iterable[tuple[str, str]] | None) -> dict[str, Any]:
    """What a row's metadata has of parameters beyond those of the column ``sampling``."""
    further: dict[str, Any] = json.loads(dict(metadata or ()).get(SAMPLING_KEY, "{}"))
    return further


def altered_by(sampling: Mapping[str, Any], metadata: Iterable[tuple[str, str]] | None) -> list[str]:
    """The parameters for which the captured logprobs are not those of the whole softmax at the row's temperature.

    Empty: a ratio to these logprobs is unbiased. Below full support (top-p, top-k, min-p, greedy) a captured logprob is
    that of a distribution without the tokens that were cut off. Tokens that another policy would sample, and the
    behaviour never could, then have no weight that makes up for them: importance sampling needs a behaviour that is
    positive wherever the policy is. Penalties, biases and grammars make another distribution too.
    """
    cut = {
        "temperature": not (sampling["temperature"] or 0) > 0,
        "top_p": sampling["top_p"] is not None and sampling["top_p"] < 1,
        "top_k": sampling["top_k"] is not None and sampling["top_k"] > 0,
        "min_p": bool(sampling["min_p"]),
    }
    return [name for name, is_cut in cut.items() if is_cut] + sorted(
        other_parameters(metadata).keys() - {STOP_TOKEN_IDS}
    )
