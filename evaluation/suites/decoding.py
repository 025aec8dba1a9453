"""How the items of suites are answered: greedily, or by sampling parameters that each item draws by a hash of its id.

The parameters are those of users' requests, so that a policy is judged by what users would get of it. What an item
draws, and the seed of its answer, follow from its id alone: so both policies answer it alike, whoever evaluates again
comes to the same answer, and ``decisions verify`` can draw it once more. One seed for both policies also means that
those which differ little give the same answer to most items, which then say nothing by chance.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from evaluation.config import SamplingConfig, SamplingParameters
from feedback.lake.tables import Lake, NoLakeError
from feedback.sampling_parameters import SAMPLING_KEY
from feedback.schema import IMPORTED

NEWEST: Final = 50_000
"""Requests, the newest, whose parameters are counted."""

_LEAST_TOP_P: Final = 1e-6
"""In float32, which the lake has, a ``top_p`` that a request may have can be 0. All of these leave one token."""

MOST_SETS: Final = 16
"""So many sets of parameters are drawn from, the commonest ones: clients that draw them at random have no end of them,
and a plan is in every entry of a candidate."""

_OF_COLUMN: Final = ("temperature", "top_p", "top_k", "min_p")
_OF_METADATA: Final = ("presence_penalty", "frequency_penalty", "repetition_penalty")

# The lake has float32: by way of text 0.7 is 0.7 again.
_COUNTED: Final = f"""
WITH newest AS (
    SELECT sampling, metadata['{SAMPLING_KEY}'] AS further, created_at, response_id,
           [tenant, coalesce('u' || "user", 's' || session_id, 'r' || request_id)] AS unit
    FROM interactions
    WHERE status <> '{IMPORTED}' AND sampling.temperature IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY tenant, request_id ORDER BY response_id) = 1
    ORDER BY created_at DESC, response_id DESC
    LIMIT {NEWEST}
), requests AS (
    SELECT sampling, further FROM newest
    QUALIFY row_number() OVER (PARTITION BY unit ORDER BY created_at DESC, response_id DESC) = 1
)
SELECT {", ".join(f"sampling.{name}::VARCHAR::DOUBLE AS {name}" for name in _OF_COLUMN)},
       {", ".join(f"(further->>'$.{name}')::DOUBLE AS {name}" for name in _OF_METADATA)},
       count(*) AS requests
FROM requests GROUP BY ALL
"""


class ParameterSet(BaseModel):
    """Sampling parameters, and of how many requests they are: one of each user."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    parameters: SamplingParameters
    requests: int = Field(ge=1)


class Decoding(BaseModel):
    """Each item is answered by one of ``sets``, as often as requests have it; greedily where there are none.

    ``source``: where they are from. Whoever asks with temperature 0 alone, by the settings or in traffic, has no sets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["greedy", "settings", "traffic"] = "greedy"
    sets: tuple[ParameterSet, ...] = ()

    def drawn(self, item: str) -> int | None:
        """Which of ``sets`` an item is answered by; None: greedily."""
        if not self.sets:
            return None
        ends = list(itertools.accumulate(one.requests for one in self.sets))
        return bisect_right(ends, _hash("sampling", item) * ends[-1] >> 64)

    def parameters(self, item: str) -> SamplingParameters | None:
        """What an item is answered by; None: greedily."""
        at = self.drawn(item)
        return None if at is None or self.sets[at].parameters.greedy else self.sets[at].parameters

    @property
    def adverb(self) -> str:
        """``greedily``, or ``sampled at temperature 1 (80%); temperature 0.7, top_p 0.9 (20%), …``."""
        requests = sum(one.requests for one in self.sets)
        shown = [
            _in_words(one.parameters) + (f" ({one.requests / requests:.0%})" if len(self.sets) > 1 else "")
            for one in self.sets
        ]
        of = {"greedy": "", "settings": ", by the settings", "traffic": ", as requests of traffic are"}[self.source]
        return (f"sampled at {'; '.join(shown)}" if shown else "greedily") + of


GREEDY: Final = Decoding()

Traffic = Callable[[], Sequence[ParameterSet]]
"""Counts the parameters of users' requests; nothing where there are none yet."""


def settled(config: SamplingConfig, traffic: Traffic | None = None) -> Decoding:
    """How a candidate's items are answered, from before its first look on.

    ``traffic`` is asked where the settings say so. Without any, the parameters of the settings count, whose defaults
    are those of a request that names none.
    """
    if config.source == "greedy":
        return GREEDY
    counted = tuple(traffic()) if config.source == "traffic" and traffic is not None else ()
    own = SamplingParameters(**config.model_dump(include=set(SamplingParameters.model_fields)))
    sets = counted or (ParameterSet(parameters=own, requests=1),)
    if all(one.parameters.greedy for one in sets):
        sets = ()
    return Decoding(source="traffic" if counted else "settings", sets=sets)


def count_requests(lake: Lake) -> list[ParameterSet]:
    """The parameters of the newest requests, the commonest first. A user counts once, by the newest of theirs, so that
    nobody decides by many; who names none counts by session, else by request.

    What belongs to a prompt, such as stop texts or a grammar, is left out: other prompts can't be answered by it.
    Nothing where there is no lake yet. Raises LakeError.
    """
    try:
        rows = lake.read(lambda views: views.sql(_COUNTED).fetchall(), tables=("interactions",))
    except NoLakeError:
        return []
    counts: dict[SamplingParameters, int] = {}
    for *values, requests in rows:
        of: dict[str, Any] = {
            name: value for name, value in zip((*_OF_COLUMN, *_OF_METADATA), values, strict=True) if value is not None
        }
        if "top_p" in of:
            of["top_p"] = max(of["top_p"], _LEAST_TOP_P)
        if of["temperature"] == 0:  # nothing is cut off then
            of = {name: value for name, value in of.items() if name in ("temperature", *_OF_METADATA)}
        parameters = SamplingParameters(**of)
        counts[parameters] = counts.get(parameters, 0) + requests
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0].model_dump_json()))
    return [ParameterSet(parameters=parameters, requests=requests) for parameters, requests in ranked[:MOST_SETS]]


def seed_of(seed: int, item: str) -> int:
    """The seed of an item's answer, from ``evaluation.seed``."""
    return _hash(f"seed {seed}", item) >> 1


def _hash(salt: str, item: str) -> int:
    """64 bits, uniform over items."""
    return int.from_bytes(hashlib.sha256(f"{salt}\0{item}".encode(errors="surrogatepass")).digest()[:8], "big")


def _in_words(parameters: SamplingParameters) -> str:
    if parameters.greedy:
        return "greedily"
    changed = parameters.model_dump(exclude_defaults=True) | {"temperature": parameters.temperature}
    return ", ".join(f"{name} {changed[name]:g}" for name in SamplingParameters.model_fields if name in changed)
