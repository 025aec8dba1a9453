"""`millrace experiment shadow`, what it puts on record, what that holds back, and how its responses are erased."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.config.root import Settings
from deploy.display.live import shadows as shown_shadows
from deploy.loop import cycle, preflight, shadows
from deploy.loop.experiments import Controller
from deploy.loop.promotion import ExperimentRefused, PromotionRefused, promote, record_moves
from evaluation.config import ExperimentConfig, ShadowConfig
from evaluation.decisions.history import Party, hypothesis
from evaluation.shadow.comparison import Answer, Pair, ShadowPlan, compare
from evaluation.shadow.kept import Kept, Response, Result
from evaluation.shadow.verification import verify
from feedback.lake.tables import Lake
from feedback.scoring.scorer import load_rollout_sources, scorer_name
from serve.policies.store import Policy
from tests.evaluation.decisions.worlds import items, judged, rewrite
from tests.feedback.feedback_rows import interaction, put

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(home_with_policy: Settings, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([*arguments, "--config", str(home_with_policy.snapshot())])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return command


@pytest.fixture
def candidate(home_with_policy: Settings, model: Path, tmp_path: Path) -> Policy:
    """Policy 2, which has passed the gate against policy 1."""
    other = shutil.copytree(model, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"number": 2}))
    store = home_with_policy.policy_store()
    policy = store.publish(other, parent=1, lineage={}, metrics={})
    shas = policy.sha256, store.get(1).sha256
    judged(home_with_policy.ledger(), 2, items(500, gain=0.3, differing=0.4), shas=shas)
    return policy


@pytest.fixture
def lake(home_with_policy: Settings) -> Lake:
    lake = home_with_policy.lake()
    lake.create()
    return lake


def kept_of(settings: Settings, candidate: Policy) -> Kept:
    name = hypothesis(candidate.sha256, settings.policy_store().get(1).sha256)
    return Kept(shadows.shadows_folder(settings) / name[:16])


def put_on_record(
    settings: Settings, candidate: Policy, reward: float, n: int = 120, scorer: str = "exact@0123"
) -> Kept:
    """A shadow in which the candidate got this reward for every request, and the incumbent 0.5."""
    incumbent, kept = settings.policy_store().get(1), kept_of(settings, candidate)
    parties = Party(version=2, sha256=candidate.sha256), Party(version=1, sha256=incumbent.sha256)
    plan = ShadowPlan.of(ShadowConfig(share=0.5))
    pairs = [
        Pair(
            unit=f"{i:032x}",
            draw=f"{i + 1:08x}{'0' * 24}",
            candidate=Answer(reward=reward, tokens=5, cut=False),
            incumbent=Answer(reward=0.5, tokens=5, cut=False),
        )
        for i in range(n)
    ]
    with kept.alone():
        began = kept.began(*parties)
        kept.add_pairs(scorer, pairs)
    result = Result(
        candidate=parties[0], incumbent=parties[1], began=began.isoformat(), at=datetime.now(UTC).isoformat(),
        plan=plan, comparison=compare(plan, pairs), considered=n, drawn=n, left_out={"that failed": 2},
        scorer=scorer, unscored={}, ended="it is known what they show",
    )  # fmt: skip
    kept.put_result(result)
    first = shadows.record(settings.ledger(), kept, result, who="tests")
    assert first is not None
    assert shadows.record(settings.ledger(), kept, result, who="tests") is None  # once
    return kept


def test_harm_that_is_on_record_holds_a_candidate_back_unless_somebody_says_why(
    home_with_policy: Settings, candidate: Policy, run: Run
) -> None:
    settings, ledger = home_with_policy, home_with_policy.ledger()
    put_on_record(settings, candidate, 0.1)
    words = r"policy 2 passed the gate, and its shadow \(entry \d\) did harm: reward is shown to be worse: -0\.4000"
    with pytest.raises(PromotionRefused, match=words):
        promote(settings.policy_store(), ledger, 2, who="tests", why="it passed")
    with pytest.raises(ExperimentRefused, match=words):
        Controller(settings).start(2, who="tests", why="")
    code, out, _ = run("decisions", "verify")
    assert (code, "all as recorded" in out) == (0, True), out
    code, out, _ = run("decisions", "list")
    assert (code, "harm: reward is shown to be worse: -0.4000" in out) == (0, True)
    entry = next(entry for entry in ledger.entries() if entry.kind == "shadow")
    code, out, _ = run("decisions", "show", str(entry.number), "--evidence")
    assert (code, len(json.loads(out)["evidence"]["pairs"])) == (0, 120)
    pointer = promote(settings.policy_store(), ledger, 2, who="tests", why="the scorer is wrong", override=True)
    assert "did harm" in str((pointer.verdict or {})["objection"])
    record_moves(settings.policy_store(), ledger)
    assert run("decisions", "verify")[0] == 0


def test_settings_that_change_between_two_runs_count_for_neither_and_the_ledger_stays_in_order(
    home_with_policy: Settings, candidate: Policy, lake: Lake, run: Run
) -> None:
    settings, kept = home_with_policy, kept_of(home_with_policy, candidate)
    scorer = scorer_name(load_rollout_sources(settings.resolved().feedback.scoring))
    same = [
        Pair(
            unit=f"{i:032x}",
            draw=f"{int(i / 400 * 0.5 * 2**64):016x}{'0' * 16}",  # of a share of one half, as the first run had it
            candidate=Answer(reward=0.5, tokens=5, cut=False),
            incumbent=Answer(reward=0.5, tokens=5, cut=False),
        )
        for i in range(400)
    ]
    with kept.alone():
        incumbent = settings.policy_store().get(1)
        kept.began(Party(version=2, sha256=candidate.sha256), Party(version=1, sha256=incumbent.sha256))
        kept.add_pairs(scorer, same)
    shadow = ("experiment", "shadow", "2", "--evaluation.experiment.shadow.seconds", "0")
    first = run(*shadow, "--evaluation.experiment.shadow.share", "0.5")
    assert first[0] == 0, first
    changed = ("share", "0.1"), ("alpha", "0.5"), ("reward_bounds", "[0, 9]")
    others = [part for name, value in changed for part in (f"--evaluation.experiment.shadow.{name}", value)]
    code, out, err = run(*shadow, *others)
    words = "by the settings of its first run: share, alpha, reward_bounds, margins changed since"
    assert (code, words in out) == (0, True), out + err
    assert out.splitlines()[1:] == first[1].splitlines()
    assert len([entry for entry in settings.ledger().entries() if entry.kind == "shadow"]) == 1
    code, out, _ = run("decisions", "verify")
    assert code == 0, out


def test_the_settings_of_a_shadow_are_settled_step_by_step(home_with_policy: Settings, candidate: Policy) -> None:
    kept, party = kept_of(home_with_policy, candidate), Party(version=2, sha256=candidate.sha256)
    pairs = [Pair(unit="u", draw="0" * 32, candidate=(one := Answer(reward=0, tokens=1, cut=False)), incumbent=one)]
    plans = [ShadowPlan.of(ShadowConfig(share=share, alpha=share)) for share in (0.1, 0.2, 0.3, 0.4)]
    with kept.alone():
        kept.began(party, party)
        assert [kept.settle("a@1", plan) for plan in plans[:2]] == plans[:2], "nothing was answered"
        kept.add_pairs("a@1", pairs)
        assert [kept.settle("a@1", plan) for plan in plans] == [plans[1]] * 4
        other = kept.settle("b@2", plans[2])  # by which nothing was measured
        assert (other.share, other.alpha) == (0.2, 0.3)
        assert kept.settle("b@2", plans[3]).alpha == 0.4
        kept.add_pairs("b@2", pairs)
        assert kept.settle("b@2", plans[2]).alpha == 0.4
        assert kept.settle("a@1", plans[0]) == plans[1]


def test_no_harm_on_record_holds_nobody_back_and_promotes_nobody(
    home_with_policy: Settings, candidate: Policy, model: Path, tmp_path: Path
) -> None:
    settings, store = home_with_policy, home_with_policy.policy_store()
    put_on_record(settings, candidate, 0.5)
    assert promote(store, settings.ledger(), 2, who="tests", why="it passed").version == 2
    third = shutil.copytree(model, tmp_path / "third")
    (third / "generation_config.json").write_text(json.dumps({"number": 3}))
    store.publish(third, parent=2, lineage={}, metrics={})
    with pytest.raises(PromotionRefused, match="policy 3 was not evaluated"):
        promote(store, settings.ledger(), 3, who="tests", why="its shadow")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda body: body["comparison"].update(decision="no worse"), "it says no worse, and its evidence gives harm"),
        (lambda body: body["plan"].update(share=1e-12), "was not drawn, of a share of 1e-12"),
        (lambda body: body.pop("plan"), "is no shadow: plan: Field required"),
    ],
)
def test_a_shadow_that_was_rewritten_is_found(
    change: Callable[[dict[str, Any]], Any], problem: str, home_with_policy: Settings, candidate: Policy
) -> None:
    put_on_record(home_with_policy, candidate, 0.1)
    assert verify(home_with_policy.ledger()) == []
    rewrite(home_with_policy.ledger(), lambda entries: change(entries[-1]["body"]))
    (found,) = verify(home_with_policy.ledger())
    assert problem in found


def test_a_promotion_past_harm_that_is_no_override_is_found(
    home_with_policy: Settings, candidate: Policy, run: Run
) -> None:
    store, ledger = home_with_policy.policy_store(), home_with_policy.ledger()
    put_on_record(home_with_policy, candidate, 0.1)
    store.promote(2, expected=store.serving(), who="somebody", why="by hand", verdict={"verdict": "pass"})
    record_moves(store, ledger)
    code, out, _ = run("decisions", "verify")
    assert (code, "policy 2 was promoted after its shadow, entry" in out) == (1, True), out


def test_harm_that_is_shown_between_a_promotion_and_its_entry_leaves_the_ledger_in_order(
    home_with_policy: Settings, candidate: Policy, run: Run
) -> None:
    store, ledger = home_with_policy.policy_store(), home_with_policy.ledger()
    promote(store, ledger, 2, who="tests", why="it passed")  # killed here, or just not there yet
    put_on_record(home_with_policy, candidate, 0.1)  # by a shadow that ran beside
    record_moves(store, ledger)
    code, out, _ = run("decisions", "verify")
    assert code == 0, out


def test_what_it_shows_is_shown_and_in_the_report(home_with_policy: Settings, candidate: Policy, run: Run) -> None:
    assert "there was no experiment yet" in run("experiment", "show")[1]
    put_on_record(home_with_policy, candidate, 0.1)
    code, out, _ = run("experiment", "show")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "there was no experiment yet: millrace experiment start VERSION")
    assert lines[1] == "shadow of policy 2 beside policy 1: harm; it is known what they show"
    assert "120 of 120 responses of traffic were drawn (share 0.5), left out: 2 that failed" in lines[2]
    assert lines[3].startswith("  reward: -0.4000, [")
    assert lines[3].endswith("at any time, over 120 requests; harm")
    assert json.loads(run("experiment", "show", "--json")[1])["shadow"]["comparison"]["decision"] == "harm"
    (row,) = shown_shadows(shadows.shadows_folder(home_with_policy))
    assert [path.outcome for path in row.paths] == ["reward", "length", "truncation", "errors"]
    assert (row.paths[0].blocks[-1], row.paths[0].value[-1], row.paths[0].bar) == (120, pytest.approx(-0.4), -0.05)
    assert run("report")[0] == 0
    page = (home_with_policy.home / "report.html").read_text()
    assert "<h3>Shadow: v2 less v1</h3>" in page
    assert "shadow: harm" in page


def test_a_response_goes_with_its_request_by_an_erasure_and_by_maintenance(
    home_with_policy: Settings, candidate: Policy, lake: Lake, run: Run
) -> None:
    now = datetime.now(UTC)
    put(lake, "interactions", [interaction(f"r{i}", user=f"user {i}", created_at=now) for i in range(4)])
    kept = put_on_record(home_with_policy, candidate, 0.1)
    own = [
        Response(
            response_id=f"r{i}", unit=f"{i}", draw=f"{i}", response=f"secret {i}", response_token_ids=[i],
            finish_reason="stop",
        )
        for i in range(5)
    ]  # fmt: skip
    assert kept.add_responses(lake, own) == 1  # the fifth's request is not there
    file = kept.folder / "responses.jsonl"
    assert file.stat().st_mode & 0o077 == 0
    code, out, err = run("lake", "erase", "--user", "user 1", "--yes")
    assert (code, "removed 1 responses of shadows" in out) == (0, True), out + err
    assert [one.response_id for one in kept.responses()] == ["r0", "r2", "r3"]
    assert "secret 1" not in file.read_text()
    other = Lake(lake.uri, lake.config)  # as if another machine erased
    from feedback.maintenance.erasure import Target, erase

    erase(other, home_with_policy.path("elsewhere"), Target(response_id="r3"))
    assert len(kept.responses()) == 3
    code, out, err = run("lake", "maintain")
    assert (code, "removed 1 responses of shadows" in out) == (0, True), out + err
    assert [one.response_id for one in kept.responses()] == ["r0", "r2"]
    assert len(kept.pairs("exact@0123")) == 120  # numbers, which name nobody


def secret() -> Response:
    return Response(
        response_id="r0", unit="u", draw="d", response="secret", response_token_ids=[1], finish_reason="stop"
    )


def test_what_retention_takes_from_the_lake_is_gone_from_shadows_too(
    home_with_policy: Settings, candidate: Policy, lake: Lake, run: Run
) -> None:
    now = datetime.now(UTC)
    since = [interaction(f"n{i}", created_at=now - timedelta(days=i)) for i in range(6)]
    put(lake, "interactions", [interaction("r0", user="alice", created_at=now - timedelta(days=30)), *since])
    kept = put_on_record(home_with_policy, candidate, 0.1)
    assert kept.add_responses(lake, [secret()]) == 0
    code, out, err = run("lake", "retain", "--dry-run", "--feedback.lake.retain_days", "10")
    assert (code, len(kept.responses())) == (0, 1), out + err
    code, out, err = run("lake", "retain", "--feedback.lake.retain_days", "10")
    assert (code, kept.responses()) == (0, []), out + err


@pytest.mark.parametrize("command", [("erase", "--user", "alice", "--yes"), ("maintain",)])
def test_nothing_is_left_of_a_write_that_was_killed(
    command: tuple[str, ...], home_with_policy: Settings, candidate: Policy, lake: Lake, run: Run
) -> None:
    put(lake, "interactions", [interaction("r0", user="alice", created_at=datetime.now(UTC))])
    kept = put_on_record(home_with_policy, candidate, 0.1)
    kept.add_responses(lake, [secret()])
    left = kept.folder / ".responses.jsonl.0123456789abcdef.tmp"  # as ``replace_file`` names it before the rename
    left.write_bytes((kept.folder / "responses.jsonl").read_bytes())
    code, out, err = run("lake", *command)
    assert (code, left.exists()) == (0, False), out + err
    assert len(kept.responses()) == (command == ("maintain",))


def test_without_traffic_it_can_not_tell_and_nothing_is_on_record(
    home_with_policy: Settings, candidate: Policy, lake: Lake, run: Run
) -> None:
    before = len(home_with_policy.ledger().entries())
    code, out, err = run("experiment", "shadow", "2", "--evaluation.experiment.shadow.seconds", "0")
    assert (code, err) == (3, "")
    assert out.splitlines()[0] == "shadow of policy 2 beside policy 1: can't tell; time is up (0 s)"
    assert "0 of 0 responses of traffic were drawn" in out
    assert len(home_with_policy.ledger().entries()) == before
    assert promote(home_with_policy.policy_store(), home_with_policy.ledger(), 2, who="t", why="it passed").version == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["1"], 1, "error: policy 1 serves: a shadow compares another one with it"),
        (["9"], 1, "error: there is no policy 9 in"),
        (["newest"], 2, "'newest' is not a valid integer"),
        (["2", "--evaluation.experiment.shadow.share", "0"], 2, "evaluation.experiment.shadow.share"),
        (["2", "--evaluation.experiment.shadow.max_requests", "9"], 2, "min_requests=100 is more than shadow.max"),
        (
            ["2", "--feedback.scoring.rules.exact.weight", "0"],
            1,
            "error: nothing can score the candidate's responses: no reward",
        ),
        (["2", "--evaluation.engine.dtype", "bfloat16"], 2, "evaluation.engine.dtype=bfloat16, and the server"),
    ],
)
def test_what_can_not_be_meant_is_one_line(
    arguments: list[str], code: int, words: str, candidate: Policy, lake: Lake, run: Run
) -> None:
    found, out, err = run("experiment", "shadow", *arguments)
    assert (found, out, words in err) == (code, "", True), err


def test_no_lake_is_an_error(candidate: Policy, lake: Lake, run: Run) -> None:
    shutil.rmtree(lake.uri)
    code, _, err = run("experiment", "shadow", "2")
    assert (code, "error: there is no lake at" in err) == (1, True), err


def test_a_cycle_with_a_shadow_needs_something_that_scores(home_with_policy: Settings) -> None:
    evaluation = home_with_policy.evaluation
    shadow = evaluation.experiment.shadow.model_copy(update={"enabled": True})
    experiment = evaluation.experiment.model_copy(update={"shadow": shadow})
    scoring = home_with_policy.feedback.scoring.model_copy(update={"rules": {}})
    settings = home_with_policy.model_copy(
        update={
            "evaluation": evaluation.model_copy(update={"experiment": experiment}),
            "feedback": home_with_policy.feedback.model_copy(update={"scoring": scoring}),
        }
    )
    with pytest.raises(preflight.ConfigError, match=r"evaluation\.experiment\.shadow\.enabled: feedback\.scoring has"):
        preflight.check(settings)


def test_a_cycle_does_not_promote_what_its_shadow_shows_to_do_harm_and_goes_on_where_that_can_not_be_told(
    home_with_policy: Settings, candidate: Policy, lake: Lake
) -> None:
    shadow = {"enabled": True, "seconds": 0.0}
    experiment = ExperimentConfig.model_validate({"shadow": shadow})
    evaluation = home_with_policy.evaluation.model_copy(update={"experiment": experiment})
    settings, said = home_with_policy.model_copy(update={"evaluation": evaluation}), list[str]()
    settings.path(settings.cycle.folder).mkdir()
    turn = cycle._Cycle(settings, said.append)
    assert turn._shadow(2) is None
    stage = turn.record.stages[-1]
    assert (stage.name, stage.ok, (stage.result or {})["comparison"]["decision"]) == ("shadow", True, "can't tell")
    scorer = scorer_name(load_rollout_sources(settings.resolved().feedback.scoring))
    put_on_record(settings, candidate, 0.1, scorer=scorer)
    assert str(turn._shadow(2)).startswith("reward is shown to be worse: -0.4000")
