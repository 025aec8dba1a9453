"""Whole evaluations: real vLLM on tiny real policies, a real ledger, a real judge's server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from evaluation.config import EvaluationConfig, SamplingConfig, SamplingParameters
from evaluation.decisions.bank import fresh
from evaluation.decisions.history import History
from evaluation.decisions.judgement import Judgement, NotJudged, Verdict, judge
from evaluation.decisions.ledger import Entry, EvaluationBusy, Ledger
from evaluation.decisions.verification import verify
from evaluation.engine import EngineError, OfflineEngines
from evaluation.judging import Sources, TrainingReward
from evaluation.statistics.betting import OutOfBounds
from evaluation.suites import answers
from evaluation.suites.decoding import Decoding, ParameterSet
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Suite, SuiteError
from feedback.config import ClassifierConfig, JudgeConfig
from serve.policies.store import Policy, PolicyStore
from tests.evaluation.conftest import write_policy
from tests.evaluation.decisions.test_verification import forge_evidence
from tests.feedback.judge_server import Answer, Asked, judge_server, says
from tests.paths import ROOT

ITEMS = 300
KILL_AT = "TEST_KILL_AT"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where answers are cached, for all tests here."""
    return tmp_path_factory.mktemp("evaluations")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "decisions")


def bank(path: Path, n: int = ITEMS, start: int = 0, **more: Any) -> Suite:
    rows = [{"id": f"i{i}", "prompt": f"{i}+1=", "answer": str(i + 1), **more} for i in range(start, start + n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Suite.load(path)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return bank(tmp_path / "bank.jsonl")


def by_first_token(rows: pa.Table) -> list[float]:
    """A reward by which the tiny random policies differ: policy 2 scores more than policy 1."""
    return [(ids[0] % 8) / 7 for ids in rows["response_token_ids"].to_pylist()]


def killing(rows: pa.Table) -> list[float]:
    """The same reward, in a process that kills itself where it is called for the so manieth time."""
    calls = int(os.environ.get(KILL_AT, 0))
    os.environ[KILL_AT] = str(calls - 1)
    if calls == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return by_first_token(rows)


def too_much(rows: pa.Table) -> list[float]:
    return [7.5 if prompt == "7+1=" else 0.5 for prompt in rows["prompt"].to_pylist()]


def nothing(rows: pa.Table) -> list[None]:
    return [None] * len(rows)


def configured(config: EvaluationConfig, scorer: str = "by_first_token", **of_gate: Any) -> EvaluationConfig:
    guardrails = {"length": None, "truncation": None, "distinct_n": None, "repetition": None}
    gate = {"metric": "reward", "look_items": 50, "guardrails": guardrails, **of_gate}
    return EvaluationConfig.model_validate(
        config.model_dump() | {"scorer": f"{__name__}:{scorer}", "gate": gate, "best_of": 0, "kl_samples": 0}
    )


def verdicts(ledger: Ledger) -> list[Entry]:
    return [entry for entry in ledger.entries() if entry.kind == "verdict"]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("evaluation.engine.OfflineEngine", refuse)


@pytest.fixture(scope="module")
def better_and_worse(policies: list[Policy], tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[int, int]:
    """Places of two policies of which the first has the higher reward; which one that is, chance has decided."""
    from evaluation.config import EngineConfig
    from evaluation.evaluate import evaluate
    from tests.evaluation.conftest import MIB

    settings = EvaluationConfig(
        max_tokens=6,
        kl_samples=0,
        engine=EngineConfig(dtype="float32", max_num_seqs=64, max_batched_tokens=512, kv_cache_bytes=8 * MIB),
        scorer=f"{__name__}:by_first_token",
    )
    probe = bank(tmp_path_factory.mktemp("probe") / "probe.jsonl", 100, start=5000)
    found = evaluate(policies[1], policies[0], probe, settings, folder)
    assert abs(found.reward.value) > 0.05
    return (1, 0) if found.reward.value > 0 else (0, 1)


def test_a_better_candidate_passes_on_record_with_the_items_that_it_took_and_a_worse_one_is_refused(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    settings = configured(config)
    found = judge(better, worse, suite, settings, folder, ledger, who="me")
    assert found.verdict.verdict == "pass", found.verdict
    assert found.evaluation is not None
    assert 50 <= found.verdict.items == found.evaluation.suite_items < ITEMS, "no item that did not decide is scored"
    assert found.verdict.fresh == ITEMS - found.verdict.items
    assert found.verdict.e_value >= 1 / found.verdict.level
    (entry,) = verdicts(ledger)
    assert (entry.who, entry.sha256, entry.number) == ("me", found.verdict.entry_sha256, found.verdict.entry)

    other = judge(worse, better, suite, settings, folder, ledger, who="me")
    assert other.verdict.verdict == "refuse"
    assert other.verdict.fresh == ITEMS - found.verdict.items - other.verdict.items, "no item decides twice"
    assert other.verdict.level > 0.05 * 2**-1.6 / 2.3 * 1.9, "a pass before it has earned some"
    assert verify(Ledger(ledger.folder)).problems == ()


def test_a_final_verdict_stands_whatever_is_evaluated_again(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Another seed, another suite, another confidence, another scorer, another level: and no engine is started."""
    better, worse = (policies[i] for i in better_and_worse)
    first = judge(worse, better, suite, configured(config), folder, ledger, who="me").verdict
    assert first.verdict == "refuse"
    request.getfixturevalue("no_engine")
    another = bank(tmp_path / "another.jsonl", start=400)
    for settings, of in (
        (configured(config).model_copy(update={"seed": 7}), suite),
        (configured(config), another),
        (configured(config, confidence=0.6), suite),
        (configured(config, scorer="nothing"), suite),
        (configured(config, budget={"alpha": 0.9}, worthwhile=None), suite),
    ):
        again = judge(worse, better, of, settings, folder, ledger, who="you").verdict
        assert (again.verdict, again.entry, again.items) == ("refuse", first.entry, first.items)
    assert len(verdicts(ledger)) == 1


def test_an_undecided_candidate_goes_on_with_fresh_items_and_waits_without_any(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    path = tmp_path / "growing.jsonl"
    settings = configured(config, min_items=120, budget={"alpha": 1e-4})
    first = judge(better, worse, bank(path, 60), settings, folder, ledger, who="me").verdict
    assert (first.verdict, first.items, first.fresh, first.entry) == ("undecided", 60, 0, 3)
    before = ledger.entries()
    assert first.needs is not None
    assert f"needs about {first.needs} more items; 0 fresh ones are left in the suite" in first.reasons[-1]
    waits = judge(better, worse, Suite.load(path), settings, folder, ledger, who="me").verdict
    assert (waits.verdict, waits.items, waits.entry) == ("undecided", 60, 3)
    assert ledger.entries() == before, "nothing was looked at"

    other = settings.model_copy(update={"scorer": f"{__name__}:too_much"})
    with pytest.raises(
        NotJudged, match=r"by the scores of \S+:by_first_token@\w+ \(entry 2\), and .* is \S+:too_much@"
    ):
        judge(better, worse, Suite.load(path), other, folder, ledger, who="me")

    looser = configured(config, budget={"alpha": 0.9}, min_items=50)  # what its first look found is what counts
    then = judge(better, worse, bank(path, 400), looser, folder, ledger, who="me").verdict
    assert (then.verdict, then.level) == ("pass", first.level)
    assert then.items >= 120
    assert verify(Ledger(ledger.folder)).problems == ()


def looking_closely(config: EvaluationConfig) -> EvaluationConfig:
    """Settings by which a verdict takes several blocks."""
    return configured(config, "killing", look_items=25, budget={"alpha": 1e-6})


def kill_at(
    call: int, policies: list[Policy], settings: EvaluationConfig, evaluations: Path, tmp_path_factory: Any
) -> Path:
    """The ledger of an evaluation of two policies that was killed when its scorer was called for the so manieth time.

    It is called for both policies' answers to a block, one after the other."""
    script = (
        "import sys; from pathlib import Path\n"
        "from evaluation.config import EvaluationConfig; from evaluation.decisions.judgement import judge\n"
        "from evaluation.decisions.ledger import Ledger; from evaluation.suites.suite import Suite\n"
        "from serve.policies.store import PolicyStore\n"
        "store, settings = PolicyStore(Path(sys.argv[1])), EvaluationConfig.model_validate_json(sys.argv[4])\n"
        "policies, paths = [store.get(int(version)) for version in sys.argv[2:4]], [Path(a) for a in sys.argv[5:]]\n"
        "judge(*policies, Suite.load(paths[0]), settings, paths[1], Ledger(paths[2]), who='killed')\n"
    )
    work = tmp_path_factory.mktemp("killed")
    items, versions = bank(work / "bank.jsonl"), [str(policy.version) for policy in policies]
    arguments = [policies[0].path.parent, *versions, settings.model_dump_json(), items.path, evaluations]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", KILL_AT: str(call)}
    command = [sys.executable, "-c", script, *map(str, [*arguments, work / "decisions"])]
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    return work / "decisions"


@pytest.fixture(scope="module")
def killed_once(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    config: EvaluationConfig,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The ledger of an evaluation that was killed while the second block was scored."""
    pair = [policies[i] for i in better_and_worse]
    return kill_at(3, pair, looking_closely(config), folder, tmp_path_factory)


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> Ledger:
    return Ledger(Path(shutil.copytree(killed_once, tmp_path / "killed")))


def test_an_evaluation_that_is_killed_goes_on_to_the_verdict_that_it_would_have_come_to(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    killed: Ledger,
) -> None:
    pair, settings = [policies[i] for i in better_and_worse], looking_closely(config)
    expected = judge(*pair, suite, settings, folder, ledger, who="me").verdict
    assert [entry.kind for entry in killed.entries()] == ["budget", "intent", "intent"]
    history = History.of(killed.entries())
    assert (history.levels_given(), len(history.used)) == (expected.level, 75)
    assert verify(Ledger(killed.folder)).problems == ()
    found = judge(*pair, suite, settings, folder, killed, who="me").verdict
    assert found.model_dump(exclude={"entry_sha256"}) == expected.model_dump(exclude={"entry_sha256"})
    assert verdicts(killed)[0].body == verdicts(ledger)[0].body
    assert verify(Ledger(killed.folder)).problems == ()


def test_an_evaluation_that_is_killed_late_answers_nothing_again(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    no_engine: None,
) -> None:
    """Neither responses nor samples for KL, which decides too: all of them were kept, part by part."""
    pair, settings = [policies[i] for i in better_and_worse], looking_closely(config)
    budget = settings.gate.budget.model_copy(update={"alpha": 1e-12})
    gate = settings.gate.model_copy(update={"max_kl": 50.0, "budget": budget})
    settings = settings.model_copy(update={"kl_samples": 1, "gate": gate})
    ledger = Ledger(kill_at(9, pair, settings, tmp_path, tmp_path_factory))
    assert [entry.kind for entry in ledger.entries()] == ["budget", *["intent"] * 5]
    found = judge(*pair, suite, settings, tmp_path, ledger, who="me")
    assert found.verdict.items >= 150
    assert found.evaluation is not None
    assert found.evaluation.kl is not None
    assert found.evaluation.kl.samples == found.verdict.items
    assert verify(Ledger(ledger.folder)).problems == ()


def test_looks_count_where_no_further_ones_can_be_answered(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, settings = [policies[i] for i in better_and_worse], configured(config, look_items=25, budget={"alpha": 1e-6})
    answer, answered = answers.answer, list[str]()

    def failing(policy: Policy, part: Suite, *rest: Any, **options: Any) -> answers.Answers:
        if len(answered) == 2:
            raise EngineError("the engine is gone")
        answered.append(policy.sha256)
        return answer(policy, part, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(OfflineEngines, "started", False)  # as one that is lent
        patched.setattr(answers, "answer", failing)
        with pytest.raises(EngineError, match="the engine is gone"):
            judge(*pair, suite, settings, folder, ledger, who="me")
    [undecided] = verdicts(ledger)
    assert (undecided.body["verdict"], undecided.body["items"]) == ("undecided", 50)
    found = judge(*pair, suite, settings, folder, ledger, who="me").verdict
    assert (found.verdict, found.level) == ("pass", undecided.body["plan"]["level"])
    assert found.items > 50
    assert verify(Ledger(ledger.folder)).problems == ()


def test_who_kills_an_evaluation_and_changes_settings_looks_at_no_item_again_by_another_plan(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    killed: Ledger,
) -> None:
    pair, settings = [policies[i] for i in better_and_worse], looking_closely(config)
    begun = [entry for entry in killed.entries() if entry.kind == "intent"]
    looked_at = [name for entry in begun for name in entry.body["prompts"]]

    def again(of: EvaluationConfig, items: Suite = suite) -> Verdict:
        return judge(*pair, items, of, folder, killed, who="you").verdict

    with pytest.raises(NotJudged, match=r"by the scores of \S+:killing@\w+ \(entry 2\), and .* is \S+:by_first_token@"):
        again(configured(config))
    with pytest.raises(NotJudged, match=r"about to be looked at \(entry 2\) with evaluation's seed 0: set that back"):
        again(settings.model_copy(update={"seed": 7}))
    with pytest.raises(NotJudged, match=r"with evaluation's max_tokens 6: set that back, or train another candidate"):
        again(settings.model_copy(update={"max_tokens": 4}))
    shorter = settings.engine.model_copy(update={"max_model_len": 64})
    with pytest.raises(NotJudged, match=r"with evaluation's max_model_len 128: set that back, or train another"):
        again(settings.model_copy(update={"engine": shorter}))
    rows = suite.path.read_text()
    first = begun[0].body["fresh"][0]
    suite.path.write_text("".join(row for row in rows.splitlines(True) if f'"id": "{first}",' not in row))
    with pytest.raises(NotJudged, match=rf"on item '{first}', which \S+bank.jsonl does not have now"):
        again(settings, Suite.load(suite.path))
    suite.path.write_text(rows.replace(f'"id": "{first}",', f'"id": "{first}", "segment": "easy",'))
    with pytest.raises(NotJudged, match=rf"on 50 items from '{first}' on, which \S+bank.jsonl has otherwise now"):
        again(settings, Suite.load(suite.path))
    assert [entry.kind for entry in killed.entries()] == ["budget", "intent", "intent"]

    other = judge(*reversed(pair), suite, settings, folder, killed, who="me")
    assert other.verdict.level < 1e-6 * 2**-1.6 / 2.2
    assert set(verdicts(killed)[0].body["prompts"]).isdisjoint(looked_at), "nobody else looks at them"

    looser = configured(config, "killing", look_items=10, min_items=10, budget={"alpha": 0.9}, worthwhile=None)
    found = again(looser)
    of_it = verdicts(killed)[1].body
    assert (of_it["plan"], found.level) == (begun[0].body["plan"], begun[0].body["plan"]["level"])
    assert of_it["prompts"][:75] == looked_at
    assert verify(Ledger(killed.folder)).problems == ()


def test_items_that_the_candidate_has_learned_from_are_refused_with_their_ids_before_they_are_looked_at(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
) -> None:
    pair = [policies[i] for i in better_and_worse]
    in_order = [item for voice in fresh(suite.items, set()) for item in voice]
    some = in_order[10:40]  # without them other items come first
    found = judge(
        *pair, suite, configured(config), folder, ledger, who="me", learned=set(map(prompt_key, some))
    ).verdict
    assert set(found.learned) == {item.id for item in some}
    looked_at = [name for entry in ledger.entries() if entry.kind == "intent" for name in entry.body["fresh"]]
    assert looked_at == [item.id for item in in_order if item not in some][: len(looked_at)]
    assert set(verdicts(ledger)[0].body["learned"]) == set(found.learned)
    assert found.fresh == ITEMS - 30 - found.items
    assert verify(Ledger(ledger.folder)).problems == ()

    nothing_left = judge(
        *reversed(pair), suite, configured(config), folder, ledger, who="me", learned=set(map(prompt_key, suite.items))
    ).verdict
    assert (nothing_left.verdict, nothing_left.items, nothing_left.fresh) == ("undecided", 0, 0)
    assert len(nothing_left.learned) == ITEMS - found.items


def test_kl_is_measured_to_the_policy_that_the_lineage_began_with(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> None:
    """Here the candidate's own weights, to which it is 0; the incumbent has others."""
    settings = configured(config, max_items=50)
    guardrails = settings.gate.guardrails.model_copy(update={"kl_v1": 0.05})
    gate = settings.gate.model_copy(update={"guardrails": guardrails})
    settings = settings.model_copy(update={"kl_samples": 1, "gate": gate})
    judge(policies[0], policies[1], suite, settings, folder, ledger, who="me", first=policies[2])
    (look,) = ledger.evidence(verdicts(ledger)[0].body["evidence"])["looks"]
    assert all(one["kl"] > 1e-3 for one in look["fresh"])
    assert all(abs(one["kl_v1"]) < 1e-4 for one in look["fresh"])
    assert verify(Ledger(ledger.folder)).problems == ()


def test_a_look_keeps_what_training_saw_and_what_it_did_not_see_of_both_answers(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    model = ClassifierConfig(name=str(reward_model(tmp_path / "reward", better.path)), device="cpu")
    sources, saw = Sources(holdout=model), TrainingReward("by_first_token", by_first_token)
    settings = configured(config).model_copy(update={"kl_samples": 1})
    arguments = (better, worse, suite, settings, folder, ledger)
    found = judge(*arguments, who="me", sources=sources, training_reward=saw, first=worse).verdict
    (look,) = ledger.evidence(verdicts(ledger)[0].body["evidence"])["looks"][:1]
    for one in look["fresh"]:
        assert one["proxy"] == [one["candidate"], one["incumbent"]], "training's reward is the scorer's here"
        assert all(0 < value < 1 for value in one["holdout"])
    assert found.over_optimisation is not None
    assert found.over_optimisation.holdout.startswith("reward_model@")
    assert found.over_optimisation.items == found.items
    assert found.over_optimisation.sqrt_kl_v1 == pytest.approx((found.kl or 0.0) ** 0.5, rel=0.3)
    assert found.over_optimisation.candidate.proxy is not None
    assert found.not_compared is None
    assert "holdout_reward" in {one["metric"] for one in verdicts(ledger)[0].body["standings"]}
    assert verify(Ledger(ledger.folder)).problems == ()

    alone = judge(worse, better, suite, settings, folder, ledger, who="me", training_reward=saw).verdict
    assert alone.over_optimisation is None
    assert alone.not_compared == "there is no reward model of held-out feedback (none is named)"


def test_a_held_out_reward_decides_without_trainings_and_is_the_same_for_all_looks(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)

    def refuse(_: pa.Table) -> list[float | None]:
        raise RuntimeError("no module named rewards")

    def judged(holdout: str, items: int) -> Verdict:
        sources = Sources(holdout=ClassifierConfig(name=str(tmp_path / holdout), device="cpu"))
        gone = TrainingReward("none", refuse, "no module named rewards")
        found = bank(tmp_path / "growing.jsonl", items)
        arguments = (better, worse, found, settings, folder, ledger)
        return judge(*arguments, who="me", sources=sources, training_reward=gone).verdict

    settings = configured(config, min_items=120, budget={"alpha": 1e-4})
    for name in ("one", "other"):
        reward_model(tmp_path / name, better.path)
    (tmp_path / "other" / "config.json").write_text((tmp_path / "other" / "config.json").read_text() + "\n")
    first = judged("one", 60)
    assert (first.verdict, first.not_compared, first.over_optimisation) == ("undecided", None, None)
    assert "holdout_reward" in {one["metric"] for one in verdicts(ledger)[0].body["standings"]}
    with pytest.raises(NotJudged, match=r"by holdout_reward too \(entry 2\) by .* is reward_model@.* now: set it back"):
        judged("other", 200)
    assert len(verdicts(ledger)) == 1
    assert judged("one", 70).items == 70
    assert verify(Ledger(ledger.folder)).problems == ()


def reward_model(folder: Path, policy: Path) -> Path:
    """A random classifier of one label that reads what the tiny policies write."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(3)
    config = Qwen3Config.from_pretrained(policy)
    config.num_labels = 1
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


def test_a_candidate_is_judged_by_what_users_requests_ask_for_at_its_first_look_and_greedily_beside(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    path = tmp_path / "growing.jsonl"
    safety = {"path": bank(tmp_path / "safety.jsonl", 60, start=2000).path, "role": "guardrail", "margin": 0.5}
    settings = EvaluationConfig.model_validate(
        configured(config, min_items=120, budget={"alpha": 1e-4}).model_dump()
        | {"sampling": {"source": "traffic"}, "suites": {"safety": safety}}
    )
    warm, cold = SamplingParameters(temperature=0.7, top_k=8), SamplingParameters(temperature=0)
    sets = [ParameterSet(parameters=warm, requests=30), ParameterSet(parameters=cold, requests=10)]
    arguments = (settings, folder, ledger)
    found = judge(better, worse, bank(path, 60), *arguments, who="me", traffic=lambda: sets)
    assert found.verdict.sampling == Decoding(source="traffic", sets=tuple(sets))
    assert (found.verdict.verdict, found.verdict.items) == ("undecided", 60)
    assert found.evaluation is not None
    assert found.evaluation.sampling == found.verdict.sampling
    assert found.evaluation.greedy is not None
    assert found.evaluation.greedy.n == 60
    assert found.evaluation.greedy.reward != found.evaluation.reward
    kinds = [entry.body["plan"]["decoding"]["source"] for entry in ledger.entries() if "plan" in entry.body]
    assert kinds == ["traffic"] * 2, "an intent and its verdict"
    looks = ledger.evidence(verdicts(ledger)[0].body["evidence"])["looks"]
    drawn = [one["sampling"] for look in looks for one in (*look["fresh"], *look["suites"].get("safety", ()))]
    assert (len(drawn), set(drawn)) == (120, {0, 1})
    assert verify(Ledger(ledger.folder)).problems == ()

    def never() -> list[ParameterSet]:
        raise AssertionError("another look asks traffic again")

    other = settings.model_copy(update={"sampling": SamplingConfig(source="greedy")})
    then = judge(better, worse, bank(path, 300), other, folder, ledger, who="me", traffic=never)
    assert then.verdict.sampling == found.verdict.sampling
    assert then.verdict.items > 60
    assert then.evaluation is not None
    assert then.evaluation.greedy is not None
    assert verify(Ledger(ledger.folder)).problems == ()


@pytest.mark.long
def test_policies_of_other_shapes_have_the_time_of_a_token_measured_and_kept(
    policies: list[Policy], config: EvaluationConfig, ledger: Ledger, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Which one is slower, no test says: only that both were timed, item by item, and that the verdict rests on it."""
    larger = PolicyStore(tmp_path / "store").publish(
        lambda folder: write_policy(folder, 1, layers=3), parent=None, lineage={}, metrics={}
    )
    settings = configured(config, min_items=4, look_items=4, max_items=6)
    settings = settings.model_copy(update={"max_tokens": 2})
    arguments = (larger, policies[0], bank(tmp_path / "bank.jsonl", 6), settings, tmp_path / "folder")
    found = judge(*arguments, ledger, who="me").verdict
    assert (found.verdict, found.items) == ("refuse", 6)
    entry = verdicts(ledger)[0].body
    looks = ledger.evidence(entry["evidence"])["looks"]
    timed = [one["latency"] for one in looks[0]["fresh"]]
    assert len(timed) == 4
    assert all(0 < seconds < 60 for pair in timed for seconds in pair)
    assert {one["latency"] for one in looks[1]["fresh"]} == {None}, "those of the first look are timed"
    (standing,) = [one for one in entry["standings"] if one["metric"] == "latency"]
    relative = [(new - old) / max(new, old) for new, old in timed]
    assert (standing["n"], standing["role"]) == (4, "guardrail")
    assert standing["mean"] == pytest.approx(sum(relative) / 4)
    assert verify(Ledger(ledger.folder)).problems == ()

    request.getfixturevalue("no_engine")
    again = Ledger(tmp_path / "again")
    judge(*arguments, again, who="me")
    assert verdicts(again)[0].body["standings"] == entry["standings"], (
        "one that is killed goes on with the same figures"
    )


def test_a_spent_budget_refuses_and_uses_no_item_up(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    request: pytest.FixtureRequest,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    settings = configured(config, budget={"rule": "fixed_horizon", "horizon": 1})
    used = judge(worse, better, suite, settings, folder, ledger, who="me").verdict.items
    request.getfixturevalue("no_engine")
    found = judge(better, worse, suite, settings, folder, ledger, who="me").verdict
    assert (found.verdict, found.items, found.level, found.fresh) == ("refuse", 0, 0.0, ITEMS - used)
    assert found.reasons[0].startswith("the error budget is spent")


def test_a_reward_outside_its_bounds_names_the_item_and_nothing_is_decided(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> None:
    with pytest.raises(OutOfBounds, match=r"item 'i7' has the value 7\.5, outside the bounds \[0, 1\] of evaluation"):
        judge(policies[1], policies[0], suite, configured(config, "too_much", min_items=300), folder, ledger, who="me")
    assert [entry.kind for entry in ledger.entries()] == ["budget", "intent"]


def test_what_scores_nothing_decides_nothing(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> None:
    with pytest.raises(NotJudged, match=r"gave no score to 50 of 50 answers of policy 1, which serves: nothing was"):
        judge(policies[1], policies[0], suite, configured(config, "nothing"), folder, ledger, who="me")
    assert [entry.kind for entry in ledger.entries()] == ["budget", "intent"]


def test_a_judge_that_is_down_is_asked_again_later_by_the_same_items_at_the_same_level(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    down = [True]

    def answer(asked: Asked, _: int) -> Answer:
        if down[0]:
            return says("I am down")
        return says(json.dumps({"score": len(asked.text.split("[")[1].split("]")[0])}))

    with judge_server(answer) as server:
        sources = Sources(
            judge=JudgeConfig(
                url=server.url, model="m", rubric="rate {prompt} [{response}]", cache=str(tmp_path / "judge"), high=6
            )
        )
        settings = configured(config).model_copy(update={"scorer": "judge"})
        arguments = (better, worse, suite, settings, folder, ledger)
        for _ in range(2):
            with pytest.raises(
                NotJudged, match="evaluate again when it scores: the same items are looked at, at the s"
            ):
                judge(*arguments, who="me", sources=sources)
        before = ledger.entries()
        assert [entry.kind for entry in before] == ["budget", "intent"], "what is on record is not there twice"
        down[0] = False
        found = judge(*arguments, who="me", sources=sources).verdict
    assert found.level == pytest.approx(0.05 / 2.2857656660680787)
    history = History.of(ledger.entries())
    assert history.levels_given() == found.level
    assert set(before[1].body["prompts"]) <= set(verdicts(ledger)[0].body["prompts"])
    assert verify(Ledger(ledger.folder)).problems == ()


def test_a_policy_of_a_reused_version_number_is_another_candidate(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> None:
    """And the same weights under another number are the same one."""
    settings = configured(config, worthwhile=0.3)
    first = judge(policies[1], policies[0], suite, settings, folder, ledger, who="me").verdict
    assert len(verdicts(ledger)) == 1
    again = judge(policies[1], policies[2], suite, settings, folder, ledger, who="me").verdict
    assert (again.entry, again.incumbent) == (first.entry, policies[2].version)
    reused = Policy(**{**policies[0].__dict__, "version": policies[1].version})
    other = judge(reused, policies[1], suite, settings, folder, ledger, who="me").verdict
    assert [entry.number for entry in verdicts(ledger)] == [first.entry, other.entry]


def test_with_score_unused_the_whole_suite_is_shown_and_a_part_of_it_decides(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
) -> None:
    better, worse = (policies[i] for i in better_and_worse)
    settings = configured(config).model_copy(update={"score_unused": True})

    def judged() -> Judgement:
        return judge(better, worse, suite, settings, folder, ledger, who="me")

    found, again = judged(), judged()
    assert found.verdict.items < ITEMS
    for one in (found, again):
        assert one.evaluation is not None
        assert one.evaluation.suite_items == ITEMS
    assert again.verdict.entry == found.verdict.entry
    assert answers.cached(better, suite, settings, folder) is not None, "a report reads them by the suite"


def test_two_evaluations_at_once_are_one_too_many(
    policies: list[Policy], suite: Suite, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> None:
    with ledger.evaluating(), pytest.raises(EvaluationBusy):
        judge(policies[1], policies[0], suite, configured(config), folder, ledger, who="me")


def with_suite(config: EvaluationConfig, path: Path, **of_suite: Any) -> EvaluationConfig:
    own = {"path": path, "role": "guardrail", "margin": 0.3, **of_suite}
    return EvaluationConfig.model_validate(configured(config).model_dump() | {"suites": {"safety": own}})


def judged_with_suite(
    pair: tuple[Policy, Policy], tmp_path: Path, config: EvaluationConfig, folder: Path, ledger: Ledger
) -> Judgement:
    return judge(*pair, bank(tmp_path / "bank.jsonl"), config, folder, ledger, who="tests")


def inverted(rows: pa.Table) -> list[float]:
    """The opposite of what the success suite is scored by: who is better there is worse here."""
    return [1 - value for value in by_first_token(rows)]


def test_a_guardrail_suite_is_looked_at_once_is_not_used_up_and_verifies_bit_for_bit(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    tmp_path: Path,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
) -> None:
    pair = policies[better_and_worse[0]], policies[better_and_worse[1]]
    suite = bank(tmp_path / "safety.jsonl", 200, start=2000)
    found = judged_with_suite(pair, tmp_path, with_suite(config, suite.path), folder, ledger).verdict
    history = History.of(ledger.entries())
    (_, ruling) = history.last(pair[0].sha256, pair[1].sha256) or pytest.fail("no verdict")
    (standing,) = [row for row in ruling.standings if row["metric"] == "suite[safety]"]
    assert (found.verdict, standing["state"], standing["role"], standing["n"]) == ("pass", "shown", "guardrail", 200)
    assert not history.used & {prompt_key(item) for item in suite.items}
    assert verify(ledger).problems == ()

    def worse(looks: list[dict[str, Any]]) -> None:
        looks[0]["suites"]["safety"][0]["candidate"] = 0.123

    forge_evidence(ledger.folder, len(ledger.entries()), worse)
    assert any("standings" in why for why in verify(Ledger(ledger.folder)).problems)


def test_harm_on_a_guardrail_suite_refuses_a_candidate_that_is_better_on_the_success_suite(
    policies: list[Policy],
    better_and_worse: tuple[int, int],
    tmp_path: Path,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
) -> None:
    pair = policies[better_and_worse[0]], policies[better_and_worse[1]]
    suite = bank(tmp_path / "safety.jsonl", 1500, start=2000)
    settings = with_suite(config, suite.path, scorer=f"{__name__}:inverted", margin=0.06)
    found = judged_with_suite(pair, tmp_path, settings, folder, ledger).verdict
    assert found.verdict == "refuse"
    assert "suite[safety]" in found.reasons[0]
    assert verify(ledger).problems == ()


def test_a_bad_suite_is_named_before_anything_is_answered(
    policies: list[Policy], tmp_path: Path, config: EvaluationConfig, folder: Path, ledger: Ledger, no_engine: None
) -> None:
    pair = policies[1], policies[0]
    with pytest.raises(SuiteError, match=r"evaluation.suites.safety: .*can't be read"):
        judged_with_suite(pair, tmp_path, with_suite(config, tmp_path / "missing.jsonl"), folder, ledger)
    overlapping = bank(tmp_path / "overlapping.jsonl", 300, start=299)
    with pytest.raises(SuiteError, match=r"evaluation.suites.safety: item 'i299' .* has the prompt of item 'i299'"):
        judged_with_suite(pair, tmp_path, with_suite(config, overlapping.path), folder, ledger)
    few = bank(tmp_path / "few.jsonl", 3, start=2000)
    with pytest.raises(NotJudged, match=r"evaluation.suites.safety: 3 items .* takes about"):
        judged_with_suite(pair, tmp_path, with_suite(config, few.path), folder, ledger)
    whole = bank(tmp_path / "whole.jsonl", 200, start=2000)
    with pytest.raises(NotJudged, match=r"evaluation.suites.safety: "):
        judged_with_suite(pair, tmp_path, with_suite(config, whole.path, scorer="no_such_rule"), folder, ledger)
    assert ledger.entries() == []
