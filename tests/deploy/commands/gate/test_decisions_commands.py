"""`millrace decisions list`, `show`, `verify` and `power`, as a person types them."""

from __future__ import annotations

import json

import pytest

from deploy import cli
from deploy.config.root import Settings
from feedback.files import make_key
from tests.evaluation.decisions.worlds import compared, config, items, judged, rewrite


@pytest.fixture
def home(home_with_policy: Settings) -> Settings:
    """A home in which a candidate passed and another was refused."""
    judged(home_with_policy.ledger(), 2, items(500, gain=0.3, differing=0.5, name="a"))
    judged(home_with_policy.ledger(), 3, items(500, gain=-0.3, differing=0.5, name="b"))
    return home_with_policy


def run(settings: Settings, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.run([*arguments, "--home", str(settings.home)])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_decisions_are_listed_shown_and_verified(home: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(home, capsys, "decisions", "list")
    assert (code, "2 candidates, 1 passed" in printed) == (0, True), printed
    code, printed = run(home, capsys, "decisions", "list", "--json")
    kinds = ["budget", "intent", "intent", "verdict", "intent", "intent", "verdict"]
    entries = json.loads(printed)
    assert [entry["kind"] for entry in entries] == kinds
    assert [entry["body"].get("verdict") for entry in entries if entry["kind"] == "verdict"] == ["pass", "refuse"]
    code, printed = run(home, capsys, "decisions", "show", "7", "--evidence")
    shown = json.loads(printed)
    assert (code, shown["number"], shown["evidence"]["looks"][0]["fresh"][0]["item"]) == (0, 7, "b0")
    code, printed = run(home, capsys, "decisions", "show", "8")
    assert (code, "there is no decision 8" in printed) == (2, True), printed
    code, printed = run(home, capsys, "decisions", "verify")
    assert (code, printed.strip()) == (0, "7 decisions, 2 verdicts recomputed: all as recorded")


def test_a_look_is_listed_where_no_verdict_came_of_it_and_levels_are_not_said_to_be_the_error(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed = run(home, capsys, "decisions", "list")
    assert [line.split()[3] for line in printed.splitlines()[1:4]] == ["budget", "verdict", "verdict"]
    assert "levels given so far: 0.0363; false discovery rate at most 0.05 (e_lond)" in printed
    judged(home.ledger(), 4, items(50, gain=0.0, differing=0.5, name="c"), killed=True)
    _, printed = run(home, capsys, "decisions", "list")
    assert [line.split()[3] for line in printed.splitlines()[1:5]] == ["budget", "verdict", "verdict", "intent"]
    assert "to be looked at" in printed
    assert "3 candidates, 1 passed" in printed
    _, printed = run(home, capsys, "decisions", "list", "--all")
    assert [line.split()[3] for line in printed.splitlines()[1:8]].count("intent") == 4


def test_policies_that_a_judge_has_compared_are_ranked_on_one_scale(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = run(home, capsys, "decisions", "ranking")
    assert (code, "no answers were compared yet: evaluation.scorer=pairwise" in printed) == (0, True), printed
    pairwise = config().model_copy(update={"scorer": "pairwise"})
    for version in (12, 13):
        pairs = compared(400, better=0.8, longer=0.5, ratio=1.1, seed=version, name=f"{version}-")
        judged(home.ledger(), version, pairs, incumbent=version - 1, settings=pairwise, scorer="judge@1")
    code, printed = run(home, capsys, "decisions", "ranking")
    lines = printed.splitlines()
    assert (code, lines[0]) == (0, "compared by judge@1")
    assert lines[1].split()[-4:] == ["over", "policy", "11", "comparisons"]
    assert [line.split()[0] for line in lines[2:5]] == ["13", "12", "11"]
    assert lines[5].startswith("of two equal answers the judge takes the longer ")
    code, printed = run(home, capsys, "decisions", "ranking", "--json")
    (scale,) = json.loads(printed)
    assert (code, scale["baseline"], [row["policy"] for row in scale["policies"]]) == (0, 11, [13, 12, 11])
    assert scale["policies"][2]["win_rate"] == [0.5, 0.5, 0.5]
    assert scale["policies"][0]["win_rate"][1] > 0.5
    assert run(home, capsys, "decisions", "verify")[0] == 0


def test_a_changed_line_is_named_by_every_command_that_reads_it(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home.ledger().file
    file.write_text(file.read_text().replace('"verdict":"refuse"', '"verdict":"pass"'))
    for command in (("decisions", "verify"), ("decisions", "list"), ("power", "--gain", "0.1")):
        code, printed = run(home, capsys, *command)
        assert (code, f"{file}, line 7 was changed" in printed) == (1, True), printed


def test_a_ledger_is_signed_with_a_key_and_what_was_rewritten_without_it_is_found(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--evaluation.decisions_key", "../secret/ledger.key")
    code, printed = run(home, capsys, "decisions", "verify", *key)
    missing = "evaluation.decisions_key=../secret/ledger.key can't be read: No such file"
    assert (code, missing in printed) == (2, True), printed
    make_key(home.home.parent / "secret" / "ledger.key")
    code, printed = run(home, capsys, "decisions", "verify", *key)
    assert (code, "`millrace decisions sign` signs what is there" in printed) == (1, True), printed
    code, printed = run(home, capsys, "decisions", "sign", *key)
    assert (code, "is signed up to decision 8" in printed) == (0, True), printed
    code, printed = run(home, capsys, "decisions", "verify", *key)
    assert (code, printed.strip()) == (0, "8 decisions, 2 verdicts recomputed: all as recorded")
    rewrite(home.ledger(), lambda entries: entries[0].update(who="somebody else"))
    assert run(home, capsys, "decisions", "verify")[0] == 0, "it is consistent"
    code, printed = run(home, capsys, "decisions", "verify", *key)
    assert (code, "is not signed with the key of evaluation.decisions_key" in printed) == (1, True), printed


def test_a_verdict_that_a_policy_has_and_the_ledger_lacks_is_found(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    home.policy_store().record_gate(1, {"verdict": "pass", "entry": 7, "entry_sha256": "0" * 64})
    code, printed = run(home, capsys, "decisions", "verify")
    assert (code, "wrong: the verdict on policy 1 is entry 7, which the ledger does not have" in printed) == (1, True)


def test_power_says_how_many_items_a_gain_needs_at_the_next_candidate_s_level(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = run(home, capsys, "power", "--gain", "0.06", "--json")
    need = json.loads(printed)
    assert code == 0
    assert need["level"] == pytest.approx(0.05 * 3**-1.6 / 2.2857656660680787 * 2)  # the third, and one has passed
    assert 200 < need["median"] < need["items"] < 2000
    code, printed = run(home, capsys, "power", "--gain", "0.03")
    assert (code, "items show a gain of 0.03 with probability 0.9" in printed) == (0, True), printed
    assert "evaluation.gate.max_items=1000 is fewer" in printed
    code, printed = run(home, capsys, "power", "--gain", "0.3", "--differ", "0.1")
    assert (code, "not to be had where 10.0% of items differ" in printed) == (2, True), printed


def test_a_home_without_decisions_says_so(home_with_policy: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(home_with_policy, capsys, "decisions", "list")
    assert (code, "no decisions in" in printed) == (0, True), printed
    assert run(home_with_policy, capsys, "decisions", "verify")[0] == 0
