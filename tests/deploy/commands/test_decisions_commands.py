"""`millrace decisions list`, `show`, `verify` and `power`, as a person types them."""

from __future__ import annotations

import json

import pytest

from deploy import cli
from deploy.config.root import Settings
from tests.evaluation.decisions.worlds import items, judged


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
    assert [entry["body"]["verdict"] for entry in json.loads(printed)] == ["pass", "refuse"]
    code, printed = run(home, capsys, "decisions", "show", "2", "--evidence")
    shown = json.loads(printed)
    assert (code, shown["number"], shown["evidence"]["looks"][0]["fresh"][0]["item"]) == (0, 2, "b0")
    code, printed = run(home, capsys, "decisions", "show", "3")
    assert (code, "there is no decision 3" in printed) == (2, True), printed
    code, printed = run(home, capsys, "decisions", "verify")
    assert (code, printed.strip()) == (0, "2 decisions, 2 verdicts recomputed: all as recorded")


def test_a_changed_line_is_named_by_every_command_that_reads_it(
    home: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home.ledger().file
    file.write_text(file.read_text().replace('"verdict":"refuse"', '"verdict":"pass"'))
    for command in (("decisions", "verify"), ("decisions", "list"), ("power", "--gain", "0.1")):
        code, printed = run(home, capsys, *command)
        assert (code, f"{file}, line 2 was changed" in printed) == (1, True), printed


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
