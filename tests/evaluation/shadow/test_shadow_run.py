"""Shadows of traffic that a real server's engine has answered, by real candidates: shown, stopped, erased, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evaluation.config import EvaluationConfig, ExperimentConfig, ShadowConfig
from evaluation.engine import OfflineEngines
from evaluation.shadow.kept import ShadowBusy, ShadowError, forget_gone, shadows
from evaluation.shadow.requests import ANOTHER
from evaluation.shadow.run import REDACTED, Shadow
from feedback.config import LakeConfig, RuleConfig, ScoringConfig
from feedback.lake.tables import Lake
from feedback.maintenance.erasure import Target, erase
from serve.policies.store import PolicyStore
from tests.evaluation.conftest import write_policy
from tests.evaluation.estimation.served_traffic import publish_fond_of_digits
from tests.feedback.feedback_rows import NOON, interaction, put

N, USERS = 120, 60
DIGITS = "len(regexp_replace(response, '[^0-9]', '', 'g')) / greatest(len(response), 1)"
SCORING = ScoringConfig(rules={"digits": RuleConfig(sql=DIGITS)})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PolicyStore:
    """Policy 1; 2 is fonder of digits, which are rewarded; 3 has the weights of 2."""
    store = PolicyStore(tmp_path_factory.mktemp("policies"))
    store.publish(lambda folder: write_policy(folder, 1), parent=None, lineage={}, metrics={})
    fond = publish_fond_of_digits(store, store.get(1), steps=16)
    store.publish(fond.path, parent=2, lineage={}, metrics={})
    return store


@pytest.fixture(scope="module")
def engines(config: EvaluationConfig) -> Iterator[OfflineEngines]:
    with OfflineEngines(config.engine) as engines:
        yield engines


@pytest.fixture(scope="module")
def rows(store: PolicyStore, engines: OfflineEngines) -> list[dict[str, Any]]:
    """What policy 2 answered people, two requests of each."""
    engine = engines.of(store.get(2))
    prompts = engine.encode([f"{i % 10}+{i % 7}=" for i in range(N)])
    sampling = {"temperature": 1.0, "max_tokens": 6}
    answers = engine.answer(prompts, [sampling | {"seed": i} for i in range(N)])
    return [
        interaction(
            f"r{i:03}",
            user=f"user {i % USERS}",
            created_at=NOON + timedelta(seconds=i),
            prompt_token_ids=prompts[i],
            response=one.text,
            response_token_ids=one.token_ids,
            policy_spans=[{"start": 0, "policy_version": 2}],
            sampling=sampling | {"n": 1, "stop": []},
            finish_reason=one.finish_reason,
            metadata={},
        )
        for i, one in enumerate(answers)
    ]


@pytest.fixture
def lake(tmp_path: Path, rows: list[dict[str, Any]]) -> Lake:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    put(lake, "interactions", rows)
    return lake


@pytest.fixture
def make(store: PolicyStore, lake: Lake, config: EvaluationConfig, tmp_path: Path, engines: OfflineEngines) -> Any:
    """A shadow of a policy beside policy 2, with other settings where they are named."""

    def shadow(candidate: int, *, scoring: ScoringConfig = SCORING, **options: Any) -> Shadow:
        names = ShadowConfig.model_fields.keys() & options.keys()
        own = {"share": 1.0, "min_requests": 20, "max_requests": 200, "seconds": 0.0, "before_seconds": 1e10}
        of = ShadowConfig.model_validate(own | {name: options.pop(name) for name in names})
        settings = config.model_copy(
            update={"folder": tmp_path / "evaluations", "experiment": ExperimentConfig(shadow=of)}
        )
        say = options.pop("say", lambda _: None)
        policies = store.get(candidate), store.get(2)
        return Shadow(lake, *policies, settings, scoring, say=say, engines=engines, **options)

    return shadow


def test_a_candidate_that_does_harm_is_found_out_and_nothing_of_it_is_in_the_lake(make: Any, lake: Lake) -> None:
    before, said = lake.versions(), list[str]()
    shadow = make(1, say=said.append)
    found = shadow.run()
    assert (found.comparison.decision, found.ended) == ("harm", "it is known what they show")
    assert said == [f"policy 1 answers {USERS} requests, and nobody sees it"]
    assert (found.considered, found.drawn, found.left_out) == (
        N,
        N,
        {ANOTHER: N - 2 * USERS} if N > 2 * USERS else found.left_out,
    )
    assert found.comparison.requests == USERS  # one of each user
    reward = found.comparison.compared[0]
    assert (reward.measure, reward.harm) == ("reward", True)
    kept, pairs = shadow.kept.responses(), shadow.kept.pairs(shadow.scorer)
    assert [one.unit for one in kept] == [one.unit for one in pairs]
    digits = [sum(c.isdigit() for c in one.response) / max(len(one.response), 1) for one in kept]
    assert [one.candidate.reward for one in pairs] == pytest.approx(digits)
    assert reward.value == pytest.approx(sum(digits) / USERS - sum(p.incumbent.reward for p in pairs) / USERS)
    assert lake.versions() == before
    assert shadow.kept.result() == found
    assert shadow.run().comparison == found.comparison  # run again, it answers nothing more
    assert len(said) == 1


def test_the_same_weights_give_greedy_requests_the_very_answers_that_people_got(
    make: Any, engines: OfflineEngines, lake: Lake, rows: Sequence[dict[str, Any]]
) -> None:
    engine = engines.of(make(3).candidate)
    prompts = [row["prompt_token_ids"] for row in rows[:6]]
    greedy = engine.answer(prompts, [{"temperature": 0.0, "max_tokens": 6}] * 6)
    stops = [{"temperature": 0.0, "max_tokens": 6, "stop": [one.text[2:3]]} for one in greedy]
    stopped = engine.answer(prompts, stops)
    sampling = {"temperature": 0.0, "max_tokens": 6, "n": 1}
    put(
        lake,
        "interactions",
        [
            row
            | {"response_id": f"g{i}", "user": f"greedy {i}", "created_at": NOON + timedelta(days=1)}
            | {"response": one.text, "response_token_ids": one.token_ids, "finish_reason": one.finish_reason}
            | {"sampling": sampling | {"stop": of.get("stop", [])}}
            for i, (row, one, of) in enumerate(
                [*zip(rows, greedy, [{}] * 6, strict=False), *zip(rows, stopped, stops, strict=False)]
            )
        ],
    )
    shadow = make(3, before_seconds=0.0, min_requests=6)
    shadow.kept.folder.mkdir(parents=True)
    began = {"at": (NOON + timedelta(days=1)).isoformat()}
    (shadow.kept.folder / "began.json").write_text(json.dumps(began))
    found = shadow.run()
    assert (found.comparison.requests, found.considered) == (12, 12)
    assert [one.value for one in found.comparison.compared] == [0.0] * 4
    texts = {one.response_id: one.response for one in shadow.kept.responses()}
    assert texts == {f"g{i}": one.text for i, one in enumerate([*greedy, *stopped])}


def test_a_request_that_the_engine_does_not_take_costs_the_others_nothing_and_a_grammar_is_kept_to(
    make: Any, engines: OfflineEngines, rows: Sequence[dict[str, Any]]
) -> None:
    engine, prompts = engines.of(make(1).candidate), [row["prompt_token_ids"] for row in rows[:4]]
    bad, grammar = {"allowed_token_ids": [10**6]}, {"structured_outputs": {"regex": "[0-9]{4}"}}
    answers = engine.answer(prompts, [{"max_tokens": 6} | of for of in ({}, bad, grammar, {})])
    assert [one.finish_reason == "refused" for one in answers] == [False, True, False, False]
    assert (answers[2].text.isdigit(), len(answers[2].text)) == (True, 4)


@pytest.fixture
def stopped(make: Any) -> Shadow:
    """A shadow that was stopped between answers and scores, when it had kept 20 answers."""

    class Stop(BaseException):
        pass

    batches = []

    def redact(texts: Sequence[str]) -> dict[str, str]:
        batches.append(texts)
        if len(batches) == 2:
            raise Stop
        return {text: text for text in texts}

    shadow = make(1, max_requests=30, redact=redact)
    with pytest.raises(Stop):
        shadow.run()
    assert (len(shadow.kept.responses()), shadow.kept.pairs(shadow.scorer)) == (20, [])
    return shadow


def test_one_that_was_stopped_goes_on_and_neither_answers_nor_counts_a_request_twice(
    stopped: Shadow, make: Any
) -> None:
    before = stopped.kept.responses()
    said: list[str] = []
    found = make(1, max_requests=30, alpha=1e-9, say=said.append).run()
    assert said == ["policy 1 answers 10 requests, and nobody sees it"]
    after = stopped.kept.responses()
    assert (after[:20], len(after), len({one.unit for one in after})) == (before, 30, 30)
    assert [one.unit for one in stopped.kept.pairs(stopped.scorer)] == [one.unit for one in after]
    assert (found.comparison.requests, found.ended) == (30, "30 requests were answered, as many as may be")
    more = ScoringConfig(rules={"other": RuleConfig(sql="length(response) / 10")})
    again = make(1, max_requests=30, alpha=1e-9, scoring=more, reward_bounds=(0, 2), say=said.append).run()
    assert (again.comparison.requests, len(said)) == (30, 1)  # another scorer scores the same answers


def test_who_is_erased_between_answer_and_score_counts_for_nothing_and_leaves_nothing(
    stopped: Shadow, make: Any, lake: Lake, tmp_path: Path, rows: Sequence[dict[str, Any]]
) -> None:
    users = {row["response_id"]: row["user"] for row in rows}
    gone, other = (users[one.response_id] for one in stopped.kept.responses()[:2])
    erase(lake, tmp_path / "journal", Target(user=gone))
    said: list[str] = []
    assert forget_gone(lake, tmp_path / "evaluations" / "shadows", said.append) == 1
    assert said == ["removed 1 responses of shadows to requests that are gone"]
    assert gone not in {users[one.response_id] for one in stopped.kept.responses()}
    erase(lake, tmp_path / "journal", Target(user=other))  # and nobody tells the shadow
    said.clear()
    found = make(1, min_requests=18, max_requests=18, alpha=1e-9, say=said.append).run()
    assert said == ["1 requests are gone, erased or dropped: so is what the candidate answered to them"]
    assert found.comparison.requests == 18
    assert {users[one.response_id] for one in stopped.kept.responses()}.isdisjoint({gone, other})
    everything = b"".join(path.read_bytes() for path in stopped.kept.folder.iterdir() if path.is_file())
    assert not any(row["response_id"].encode() in everything for row in rows if row["user"] in (gone, other))


def test_an_answer_whose_request_is_erased_while_it_is_sampled_is_not_kept(
    make: Any, lake: Lake, tmp_path: Path, rows: Sequence[dict[str, Any]]
) -> None:
    users = {row["response_id"]: row["user"] for row in rows}
    erased: list[str] = []

    def redact(texts: Sequence[str]) -> dict[str, str]:
        """Between the answers and their keeping."""
        if not erased:
            first = shadow._draw(shadow.kept.began(None, None)).waiting[0]
            erased.append(users[first.response_id])
            erase(lake, tmp_path / "journal", Target(user=erased[0]))
        return {text: "[removed]" if len(erased) == 1 and text == texts[1] else text for text in texts}

    shadow = make(1, max_requests=20, redact=redact, alpha=1e-9)
    found = shadow.run()
    kept = shadow.kept.responses()
    assert erased[0] not in {users[one.response_id] for one in kept}
    withheld = [one for one in kept if one.left_out == REDACTED]
    assert found.unscored[REDACTED] == len(withheld) >= 1
    assert all((one.response, one.response_token_ids) == ("", []) for one in withheld)
    counted = [one.unit for one in shadow.kept.pairs(shadow.scorer) if one.candidate.withheld]
    assert (found.comparison.requests, counted) == (len(kept), [one.unit for one in withheld])
    least = [one.candidate.reward for one in shadow.kept.pairs(shadow.scorer) if one.candidate.withheld]
    assert set(least) == {None}


def test_no_traffic_can_not_tell_and_starts_no_engine(make: Any, lake: Lake) -> None:
    shadow = make(1, before_seconds=0.0)  # all that there is is older
    found = shadow.run()
    assert (found.comparison.decision, found.considered, found.drawn) == ("can't tell", 0, 0)
    assert found.comparison.reasons == ("0 requests were answered, and a result rests on 20 at least",)
    assert found.ended == "time is up (0 s)"


def test_two_at_once_are_one(make: Any) -> None:
    shadow = make(1)
    with shadow.kept.alone(), pytest.raises(ShadowBusy, match="another process is at work in"):
        make(1).run()


def test_a_pointer_that_was_moved_ends_it(make: Any) -> None:
    found = make(1, before_seconds=0.0, seconds=600.0, stop=lambda: "policy 9 serves now").run()
    assert found.ended == "policy 9 serves now"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scoring": ScoringConfig()}, "nothing can score the candidate's responses: no reward source"),
        ({"scoring": ScoringConfig(rules={"a": RuleConfig(sql="2")})}, r"has the reward 2 by a@.*, outside \[0, 1\]"),
    ],
)
def test_what_can_not_be_scored_is_an_error(options: dict[str, Any], words: str, stopped: Shadow, make: Any) -> None:
    with pytest.raises(ShadowError, match=words):
        make(1, **options).run()
    assert shadows(stopped.kept.folder.parent)[0].responses() == stopped.kept.responses()


def test_another_tokenizer_is_refused(make: Any, store: PolicyStore, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    write_policy(folder, 1)
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    other = store.publish(folder, parent=None, lineage={}, metrics={})
    with pytest.raises(ShadowError, match=f"policy {other.version} has another tokenizer than policy 2"):
        make(other.version)


def test_a_response_of_the_candidate_without_a_reward_counts_and_says_why(make: Any) -> None:
    """A rule that scores what has digits alone: nearly all that the incumbent answered, and less of the candidate's."""
    own = "case when length(regexp_replace(response, '[^0-9]', '', 'g')) > 0 then 1.0 end"
    shadow = make(1, scoring=ScoringConfig(rules={"own": RuleConfig(sql=own)}), max_requests=20)
    found = shadow.run()
    scored = [one for one in shadow.kept.pairs(shadow.scorer) if one.incumbent.reward is not None]
    missing = [one for one in scored if one.candidate.reward is None]
    assert (len(scored), bool(missing)) == (20 - found.comparison.unscored, True)
    assert found.comparison.compared[0].value == pytest.approx(-len(missing) / len(scored))
    (reason,) = found.unscored
    assert reason.startswith("own: ")


def test_a_scorer_that_is_down_is_an_error_and_the_same_responses_are_scored_again(make: Any) -> None:
    scoring = ScoringConfig(rules={"exact": RuleConfig(ready="exact_match")})  # and no request has a right answer
    shadow = make(1, scoring=scoring, max_requests=20)
    with pytest.raises(ShadowError, match=r"exact@.* gave no reward to 20 of 20 responses of policy 2.*; 40 × exact: "):
        shadow.run()
    before = shadow.kept.responses()
    assert (len(before), shadow.kept.pairs(shadow.scorer)) == (20, [])
    again = make(1, max_requests=20)
    assert again.run().comparison.requests == 20
    assert again.kept.responses() == before


def test_a_candidate_that_can_not_be_loaded_is_an_error_that_names_it_and_shows_nothing(
    make: Any, store: PolicyStore
) -> None:
    def broken(folder: Path) -> None:
        write_policy(folder, 1)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"hidden_size": 96}))

    shadow = make(store.publish(broken, parent=1, lineage={}, metrics={}).version)
    with pytest.raises(ShadowError, match=rf"policy {shadow.candidate.version} can't be loaded: \w+: "):
        shadow.run()
    assert shadow.kept.result() is None
    assert shadow.kept.responses() == []
