"""How items are answered: what each draws of users' sampling parameters, and what the lake says these are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import SamplingConfig, SamplingParameters
from evaluation.suites.decoding import GREEDY, MOST_SETS, Decoding, ParameterSet, count_requests, seed_of, settled
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from serve.api.generate import GenerateIn
from serve.generation.request import Sampling
from tests.feedback.feedback_rows import interaction, put

WARM = SamplingParameters(temperature=0.7, top_p=0.9)
COLD = SamplingParameters(temperature=0)
PLAIN = SamplingParameters()


def of(*sets: tuple[SamplingParameters, int]) -> Decoding:
    counted = tuple(ParameterSet(parameters=parameters, requests=requests) for parameters, requests in sets)
    return Decoding(source="traffic", sets=counted)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    return lake


def asked(name: str, temperature: float = 1.0, further: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    columns = {name: more.pop(name) for name in ("request_id", "tenant", "status") if name in more}
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "n": 1, "stop": []}
    metadata = {} if further is None else {"millrace:sampling": json.dumps(further)}
    return interaction(name, **{"request_id": name, "sampling": sampling | more, "metadata": metadata} | columns)


def test_each_set_is_drawn_as_often_as_requests_have_it_and_by_the_items_id_alone() -> None:
    decoding = of((WARM, 60), (PLAIN, 30), (COLD, 10))
    ids = [f"item {i}" for i in range(20_000)]
    drawn = [decoding.drawn(name) for name in ids]
    shares = {at: count / len(ids) for at, count in Counter(drawn).items()}
    assert shares == pytest.approx({0: 0.6, 1: 0.3, 2: 0.1}, abs=0.011), "three standard deviations"
    assert [decoding.drawn(name) for name in reversed(ids)] == drawn[::-1]
    assert {decoding.parameters(name) for name in ids} == {WARM, PLAIN, None}, "who draws greedy is answered greedily"
    assert of((WARM, 600), (PLAIN, 300), (COLD, 100)).drawn("item 5") == decoding.drawn("item 5")
    assert {of((WARM, 1)).drawn(name) for name in ids} == {0}
    assert GREEDY.drawn("item 5") is None


def test_what_an_item_draws_says_nothing_of_its_seed_nor_the_seed_of_another() -> None:
    decoding, ids = of((WARM, 1), (PLAIN, 1)), [f"item {i}" for i in range(20_000)]
    seeds = [seed_of(0, name) for name in ids]
    assert len(set(seeds)) == len(ids)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, ids[0]) != seeds[0]
    odd = sum(seed % 2 for seed, name in zip(seeds, ids, strict=True) if decoding.drawn(name) == 0)
    assert odd / sum(decoding.drawn(name) == 0 for name in ids) == pytest.approx(0.5, abs=0.015)


def test_requests_are_counted_once_with_the_parameters_that_any_prompt_can_be_answered_by(lake: Lake) -> None:
    put(
        lake,
        "interactions",
        [
            *(asked(f"several-{i}", 0.7, request_id="several", top_p=0.9) for i in range(4)),
            asked("alone", 0.7, top_p=0.9, stop=["."], further={"stop_token_ids": [5], "structured_outputs": {"a": 1}}),
            asked("gone", 0.7, top_p=0.9, status="aborted"),
            asked("another tenant's", 0.7, top_p=0.9, request_id="several", tenant="other"),
            asked("penalised", 0.7, further={"repetition_penalty": 1.1, "presence_penalty": -0.5}),
            asked("plain"),
            asked("plain too", max_tokens=100, seed=3),
            asked("greedy", 0.0),
            asked("greedy too", 0.0, top_k=5, top_p=0.5),
            asked("greedy again", 0.0),
            asked("theirs", 0.3, status="imported"),
        ],
    )
    found = {one.parameters: one.requests for one in count_requests(lake)}
    penalised = SamplingParameters(temperature=0.7, repetition_penalty=1.1, presence_penalty=-0.5)
    assert found == {WARM: 4, COLD: 3, PLAIN: 2, penalised: 1}
    assert list(found) == [WARM, COLD, PLAIN, penalised], "the commonest first"


def test_of_endless_sets_the_commonest_are_drawn_from(lake: Lake) -> None:
    odd = [asked(f"odd {i}", 0.5 + i / 100) for i in range(3 * MOST_SETS)]
    put(lake, "interactions", [*odd, asked("a", 0.2), asked("b", 0.2)])
    found = count_requests(lake)
    assert len(found) == MOST_SETS
    assert (found[0].parameters.temperature, found[0].requests) == (0.2, 2)


def test_without_requests_items_are_answered_as_a_request_that_names_no_parameter(tmp_path: Path) -> None:
    assert count_requests(Lake(str(tmp_path / "none"), LakeConfig())) == []
    for found in (settled(SamplingConfig()), settled(SamplingConfig(), list)):
        assert found == Decoding(source="settings", sets=(ParameterSet(parameters=PLAIN, requests=1),))
    for name, default in PLAIN:
        if name in GenerateIn.model_fields:
            assert GenerateIn.model_fields[name].default == getattr(Sampling(), name) == default, name
        else:
            assert (name.endswith("_penalty"), default) in ((True, 0.0), (True, 1.0))


def test_the_settings_may_name_parameters_or_greed_and_then_nobody_counts_requests() -> None:
    def never() -> list[ParameterSet]:
        raise AssertionError("traffic was read")

    by_settings = settled(SamplingConfig(source="settings", temperature=0.7, top_p=0.9), never)
    assert by_settings.parameters("any") == WARM
    assert settled(SamplingConfig(source="greedy", temperature=0.7), never) == GREEDY
    assert settled(SamplingConfig(source="settings", temperature=0), never).sets == ()
    cold = settled(SamplingConfig(), lambda: [ParameterSet(parameters=COLD, requests=9)])
    assert (cold.source, cold.sets) == ("traffic", ()), "greedy answers need no second ones beside them"
    with pytest.raises(ValueError, match=r"0 \(greedy\) or at least 0\.01, not 0\.005"):
        SamplingConfig(temperature=0.005)


def test_it_says_in_words_how_items_are_answered() -> None:
    said = of((WARM, 3), (COLD, 1)).adverb
    assert said == "sampled at temperature 0.7, top_p 0.9 (75%); greedily (25%), as requests of traffic are"
    assert settled(SamplingConfig()).adverb == "sampled at temperature 1, by the settings"
    assert GREEDY.adverb == "greedily"


def test_one_valid_request_does_not_stop_the_gate(lake: Lake) -> None:
    body = GenerateIn.model_validate({"prompt": "x", "top_p": 1e-50})  # the API takes it; the lake's float32 has 0
    put(lake, "interactions", [asked("a"), asked("b", top_p=body.top_p)])
    assert sum(one.requests for one in count_requests(lake)) == 2


def test_one_user_does_not_decide_how_the_gate_asks(lake: Lake) -> None:
    rows = [asked(f"flood {i}", 2.0) | {"user": "mallory"} for i in range(90)]
    rows += [asked(f"user {i}", 0.7) | {"user": f"user {i}"} for i in range(10)]
    put(lake, "interactions", rows)
    sets = count_requests(lake)
    total = sum(one.requests for one in sets)
    shares = {one.parameters.temperature: one.requests / total for one in sets}
    assert shares[2.0] <= 0.5, shares
