"""Answers as users ask for them, with greedy ones beside: real vLLM on tiny real policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from evaluation.config import EvaluationConfig, SamplingParameters
from evaluation.engine import OfflineEngines
from evaluation.evaluate import evaluate
from evaluation.results import Evaluation
from evaluation.suites import answers
from evaluation.suites.answers import Answers
from evaluation.suites.decoding import Decoding, ParameterSet
from evaluation.suites.suite import Suite
from serve.policies.store import Policy


def of(*sets: tuple[SamplingParameters, int]) -> Decoding:
    return Decoding(sets=tuple(ParameterSet(parameters=parameters, requests=n) for parameters, n in sets))


SURE = SamplingParameters(temperature=1.0, top_k=1)
"""By which the likeliest token is sampled, whatever the temperature."""
DECODING = of((SamplingParameters(), 2), (SamplingParameters(temperature=0), 1), (SURE, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluations")


@pytest.fixture(scope="module")
def answered(policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path) -> dict[str, Answers]:
    """Of all three policies, and of the first one to a few of the items in another order, with one engine."""
    few = replace(suite, items=suite.items[40:0:-8], sha256="few")
    with OfflineEngines(config.engine) as engines:
        found = {
            str(policy.version): answers.answer(policy, suite, config, folder, engines, decoding=DECODING)
            for policy in policies
        }
        alone = answers.answer(policies[0], few, config, folder, engines, decoding=DECODING)
        other = of((SamplingParameters(presence_penalty=2, temperature=0), 1))
        penalised = answers.answer(policies[0], few, config, folder, engines, decoding=other)
    return found | {"few": alone, "penalised": penalised}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("evaluation.engine.OfflineEngine", refuse)


def responses(table: pa.Table | None) -> dict[str, list[int]]:
    assert table is not None
    return dict(zip(table["id"].to_pylist(), table["response_token_ids"].to_pylist(), strict=True))


def test_each_item_is_answered_by_the_parameters_that_it_draws(answered: dict[str, Answers], suite: Suite) -> None:
    one = answered["1"]
    sampled, greedy = responses(one.table), responses(one.greedy)
    drawn = {item.id: DECODING.drawn(item.id) for item in suite.items}
    assert set(drawn.values()) == {0, 1, 2}
    assert all(sampled[name] == greedy[name] for name, at in drawn.items() if at != 0)
    warm = [name for name, at in drawn.items() if at == 0]
    assert sum(sampled[name] != greedy[name] for name in warm) > len(warm) / 2


def test_an_answer_follows_from_its_item_and_the_same_weights_give_the_same_one(
    answered: dict[str, Answers], suite: Suite
) -> None:
    first, second, again = (responses(answered[name].table) for name in ("1", "2", "3"))
    few = responses(answered["few"].table)
    assert len(few) == 5
    assert few == {name: first[name] for name in few}, "in another batch, at another place"
    at = [suite.items.index(item) for item in suite.items if item.id in few]
    samples = {row["id"]: row["samples"] for row in answered["1"].table.take(at).to_pylist()}
    alone = {row["id"]: row["samples"] for row in answered["few"].table.to_pylist()}
    assert {name: [one["token_ids"] for one in of] for name, of in alone.items()} == {
        name: [one["token_ids"] for one in of] for name, of in samples.items()
    }
    assert len({tuple(one["token_ids"]) for of in samples.values() for one in of}) > len(samples), "seeds differ"
    assert first == again
    assert first != second


def test_penalties_come_to_the_engine(answered: dict[str, Answers]) -> None:
    one = answered["penalised"]
    assert all(len(set(ids)) >= len(set(responses(one.greedy)[name])) for name, ids in responses(one.table).items())
    assert responses(one.table) != responses(one.greedy)


def test_sampled_answers_are_kept_by_what_items_draw_and_greedy_ones_whatever_that_is(
    answered: dict[str, Answers],
    policies: list[Policy],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    no_engine,
) -> None:
    engines = OfflineEngines(config.engine)
    again = answers.answer(policies[0], suite, config, folder, engines, decoding=DECODING)
    assert again.table == answered["1"].table
    assert again.seconds == 0
    alike = of((SamplingParameters(), 200), (SamplingParameters(temperature=0), 100), (SURE, 100))
    assert answers.answer(policies[0], suite, config, folder, engines, decoding=alike).table == again.table
    greedy = answers.answer(policies[0], suite, config, folder, engines)
    assert (greedy.table, greedy.greedy) == (again.greedy, None)
    assert greedy.table == answers.cached(policies[0], suite, config, folder)
    for other in (
        of((SamplingParameters(temperature=0.5), 1)),
        DECODING.model_copy(update={"sets": DECODING.sets[:1]}),
    ):
        with pytest.raises(AssertionError, match="an engine was started"):
            answers.answer(policies[0], suite, config, folder, engines, decoding=other)


def test_some_answers_are_taken_with_the_greedy_ones_beside_them(answered: dict[str, Answers]) -> None:
    part = answered["1"].take([7, 3])
    assert part.table["id"].to_pylist() == part.greedy["id"].to_pylist() == ["chat", "sum-0-3"]


def test_an_evaluation_is_of_sampled_answers_and_has_what_greedy_ones_come_to_beside(
    answered: dict[str, Answers], policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    own = config.model_copy(update={"scorer": f"{__name__}:first_token", "gate": config.gate})
    pair = policies[1], policies[0]
    greedy = evaluate(*pair, suite, own, folder)
    found = evaluate(*pair, suite, own, folder, decoding=DECODING)
    assert found.greedy is not None
    for name in ("candidate", "incumbent", "n", "missing", "reward", "accuracy"):
        assert getattr(found.greedy, name) == getattr(greedy, name)
    means = [sum(first_token(answered[name].table)) / len(suite.items) for name in ("2", "1")]
    assert found.reward.value == pytest.approx(means[0] - means[1])
    assert (found.candidate.reward.value, found.incumbent.reward.value) == pytest.approx(means)
    assert found.reward != greedy.reward
    assert found.kl == greedy.kl, (
        "it is measured on the incumbent's samples at temperature 1, however items are answered"
    )
    assert found.settings != greedy.settings
    assert (found.sampling, greedy.sampling.sets, greedy.greedy) == (DECODING, (), None)
    assert Evaluation.load(found.save(tmp_path)) == found
    kept = json.loads(greedy.save(tmp_path).read_text())
    (tmp_path / "old.json").write_text(json.dumps({k: v for k, v in kept.items() if k not in NEW}))
    assert Evaluation.load(tmp_path / "old.json") == greedy

    silent = evaluate(
        *pair, suite, own.model_copy(update={"scorer": f"{__name__}:sampled_only"}), folder, decoding=DECODING
    )
    assert (silent.greedy, silent.reward.value) == (None, 0.0)
    assert "scored no item" in str(silent.greedy_missing)


NEW = ("sampling", "greedy", "greedy_missing")


def first_token(rows: pa.Table) -> list[float]:
    return [(ids[0] % 8) / 7 for ids in rows["response_token_ids"].to_pylist()]


def sampled_only(rows: pa.Table) -> list[float | None]:
    """Scores the two policies' answers, which come first, and no further ones."""
    calls.append(len(rows))
    return [1.0 if len(calls) <= 2 else None] * len(rows)


calls: list[int] = []
