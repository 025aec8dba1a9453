"""The load tests' fuzz of valid requests: that it finds nothing here, and that it makes what it finds small."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.fuzz_valid import Prober, fuzz, shrink
from loadtests.valid_answers import Fault
from loadtests.valid_requests import COMPLETIONS, Case
from tests.serve.conftest import LiveServer

CASES = 60


def test_what_the_docs_allow_is_answered_as_they_say_in_every_form_and_recorded_so(server: LiveServer) -> None:
    said: list[str] = []
    outcome = fuzz(Prober(server.url, server.home, server.store.get(1).path), CASES, 3, said.append)
    assert not outcome.kinds, "\n".join(said)
    assert outcome.requests >= 2 * CASES


def test_a_request_that_fails_is_made_as_small_as_it_fails_in_the_same_way() -> None:
    def probe(cases: Sequence[Case]) -> list[list[Fault]]:
        """A fault of two fields together, and another of one of them."""
        return [
            [Fault("both", "")] if case.n > 1 and case.stops else [Fault("one", "")] if case.stops else []
            for case in cases
        ]

    large = {"prompt": ["the mill", "b"], "n": 16, "stop": ["abcd", "e", "f"], "seed": 5, "metadata": {"a": "b"}}
    small, _ = shrink(probe, Case(COMPLETIONS, large), "both")
    assert small.body == {"prompt": "a", "n": 2, "stop": ["a"]}
