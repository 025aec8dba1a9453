"""decisions list, show, verify, ranking and sign, power: what was decided and on what, and what a decision takes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from deploy.commands.common import as_json_option, audited, pass_settings
from deploy.config.root import Settings
from deploy.display.tables import print_table

if TYPE_CHECKING:
    from evaluation.decisions.ledger import Entry


@click.command("list")
@click.option("--all", "every", is_flag=True, help="Each look before it was made, too, where a verdict came of it.")
@as_json_option
@pass_settings
def list_(settings: Settings, every: bool, as_json: bool) -> None:
    """List the decisions: error budgets, verdicts, shadows, experiments, promotions and rollbacks; newest last.

    An intent is a look that was about to be made, of which no verdict came: its evaluation was killed, or failed.
    """
    from evaluation.decisions.history import History

    ledger = settings.ledger()
    entries = ledger.entries()
    if as_json:
        click.echo(json.dumps([entry.model_dump() for entry in entries], indent=2))
        return
    history = History.of(entries)
    begun = {entry.number for name in history.intents for entry, _ in history.begun(name)}
    rows = [
        [str(entry.number), entry.at[:19].replace("T", " "), entry.kind, entry.who, *_summary(entry)]
        for entry in entries
        if every or entry.kind != "intent" or entry.number in begun
    ]
    empty = f"no decisions in {ledger.folder} yet: `millrace evaluate` and cycles take them"
    print_table(["id", "at (UTC)", "decision", "who", "policy", "against", "items", "what"], rows, empty)
    if names := history.candidates:
        click.echo(
            f"\n{len(names)} candidate{'' if len(names) == 1 else 's'}, {history.passes} passed; "
            f"levels given so far: {history.levels_given():.3g}; {history.promise()}"
        )


@click.command()
@click.argument("number", type=click.IntRange(min=1), metavar="ID")
@click.option("--evidence", is_flag=True, help="The scores that it rests on too, item by item.")
@pass_settings
def show(settings: Settings, number: int, evidence: bool) -> None:
    """Print decision ID, as JSON."""
    ledger = settings.ledger()
    entries = ledger.entries()
    if number > len(entries):
        raise click.UsageError(f"there is no decision {number}: {ledger.file} has {len(entries)}")
    entry = entries[number - 1]
    shown = entry.model_dump()
    if evidence and entry.kind in ("verdict", "shadow"):
        shown["evidence"] = ledger.evidence(entry.body["evidence"])
    click.echo(json.dumps(shown, indent=2))


@click.command()
@as_json_option
@pass_settings
def verify(settings: Settings, as_json: bool) -> int:
    """Compute every verdict again from the scores that were kept, and check the chain of decisions.

    Names each decision that is not what it must be; exit code 1 if there is one. Also a policy whose verdict, or a move
    of the serving pointer, is not in the ledger, and a look at items that the candidate has learned from.
    """
    from dataclasses import asdict

    from deploy.loop.promotion import learned_items, missing_from
    from evaluation.decisions.verification import verify as recompute
    from evaluation.experiments.verification import verify as recompute_experiments
    from evaluation.shadow.verification import verify as recompute_shadows

    ledger = settings.ledger()
    found = recompute(ledger)
    problems, store = list(found.problems), settings.policy_store()
    if not problems:
        problems = [*recompute_experiments(ledger), *recompute_shadows(ledger)]
        problems += [*missing_from(ledger, store), *learned_items(ledger, store)]
    if as_json:
        click.echo(json.dumps(asdict(found) | {"problems": problems}, indent=2))
    else:
        for problem in problems:
            click.echo(f"wrong: {problem}")
        click.echo(
            f"{found.entries} decisions, {found.verdicts} verdicts recomputed: "
            f"{f'{len(problems)} problems' if problems else 'all as recorded'}"
        )
    return 1 if problems else 0


@click.command()
@as_json_option
@pass_settings
def ranking(settings: Settings, as_json: bool) -> None:
    """Rank all policies whose answers a judge has compared, from all verdicts so far.

    Win rates are of answers of one length, shown in neither order (Bradley-Terry). Policies that no comparison links,
    and those that another judge compared, are on a scale of their own.
    """
    from evaluation.decisions.history import History
    from evaluation.decisions.ranking import rankings

    ledger, confidence = settings.ledger(), settings.evaluation.gate.confidence
    found = rankings(ledger, History.of(ledger.entries()))
    if as_json:
        click.echo(json.dumps([one.to_json(confidence) for one in found], indent=2))
        return
    if not found:
        click.echo("no answers were compared yet: evaluation.scorer=pairwise has a judge compare them")
    for one in found:
        shown = one.to_json(confidence)
        click.echo(f"compared by {one.scorer}")
        if one.strengths is None:
            click.echo(f"policies {', '.join(map(str, one.versions.values()))} can't be ranked: {one.missing}")
            continue
        rows = [
            [
                str(row["policy"]),
                "{:+.2f} [{:+.2f}, {:+.2f}]".format(*row["log_odds"]),
                "{:.1%} [{:.1%}, {:.1%}]".format(*row["win_rate"]),
                str(row["comparisons"]),
            ]
            for row in shown["policies"]
        ]
        print_table(["policy", "log odds", f"wins over policy {shown['baseline']}", "comparisons"], rows, "none")
        click.echo(
            f"of two equal answers the judge takes the longer {one.strengths.longer:.1%} of the time, the first "
            f"{one.strengths.first:.1%}"
        )


@click.command()
@pass_settings
def sign(settings: Settings) -> None:
    """Sign a ledger that was begun without a key with the one of evaluation.decisions_key.

    What is there is then taken as it is: verify it before, without the key.
    """
    from deploy.loop.promotion import person

    ledger = settings.ledger()
    with audited(settings, "decisions.sign") as outcome:
        entry = ledger.sign(who=person())
        outcome.result = {"entry": entry.number}
    click.echo(f"{ledger.file} is signed up to decision {entry.number}, and so is what follows")


@click.command()
@click.option("--gain", type=click.FloatRange(min=0, min_open=True), required=True, help="The gain to be shown.")
@click.option(
    "--differ",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.1,
    show_default=True,
    help="The share of items on which the two policies' rewards differ, by the whole width of gate.reward_bounds.",
)
@click.option(
    "--power",
    "share",
    type=click.FloatRange(0, 1, True, True),
    default=0.9,
    show_default=True,
    help="The probability with which it is to be shown.",
)
@as_json_option
@pass_settings
def power(settings: Settings, gain: float, differ: float, share: float, as_json: bool) -> None:
    """Say how many fresh items the gate needs to show a gain, at the level that the next candidate would have."""
    from evaluation.decisions.gate import SPENT
    from evaluation.decisions.history import History
    from evaluation.decisions.plan import declared
    from evaluation.statistics.betting import Hypothesis
    from evaluation.statistics.power import items_needed, three_points

    gate = settings.evaluation.gate
    history = History.of(settings.ledger().entries())
    level = history.level(declared(gate), "the next one")
    low, high = (0.0, 1.0) if gate.metric == "accuracy" else gate.reward_bounds
    width = high - low
    if level <= 0:
        raise click.UsageError(SPENT)
    if gain <= gate.min_difference:
        raise click.UsageError(f"a gain of {gain:g} is not above gate.min_difference={gate.min_difference:g}")
    hypothesis = Hypothesis(gate.min_difference, -width, width)
    try:
        need = items_needed(three_points(gain, differ, width), hypothesis, level, power=share)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        shown = {"gain": gain, "differ": differ, "level": level, "items": need.items, "median": need.median}
        click.echo(json.dumps(shown | {"power": share, "max_items": gate.max_items}, indent=2))
        return
    if need.items is None:
        click.echo(f"more than {need.max_items} items, at level {level:.2g}")
        return
    click.echo(
        f"{need.items} items show a gain of {gain:g} with probability {share:g}, {need.median} in half of cases, at "
        f"level {level:.2g}, where {differ:.1%} of items differ"
    )
    if need.items > gate.max_items:
        click.echo(
            f"evaluation.gate.max_items={gate.max_items} is fewer: candidates with such a gain are often refused"
        )


def _summary(entry: Entry) -> list[str]:
    body = entry.body
    if entry.kind == "signed":
        return ["-", "-", "-", "all before it, with the key of evaluation.decisions_key"]
    if entry.kind == "budget":
        return ["-", "-", "-", "{rule}, alpha {alpha:g}, horizon {horizon}".format(**body)]
    if entry.kind == "intent":
        found = [body["candidate"]["version"], body["incumbent"]["version"], len(body["fresh"])]
        return [*map(str, found), "to be looked at"]
    if entry.kind == "verdict":
        found = [body["candidate"]["version"], body["incumbent"]["version"], body["items"]]
        return [*map(str, found), f"{body['verdict']}: {'; '.join(body['reasons'])}"]
    if entry.kind == "experiment":
        came_to = body["why"] if body["event"] == "start" else f"{body['decision']}: {body['why']}"
        versions = [str(body[name]["version"]) for name in ("candidate", "control")]
        return [*versions, "-", f"{body['event']} of experiment {body['number']}: {came_to}"]
    if entry.kind == "shadow":
        shown, versions = body["comparison"], [str(body[name]["version"]) for name in ("candidate", "incumbent")]
        return [*versions, str(shown["requests"]), f"{shown['decision']}: {'; '.join(shown['reasons'])}"]
    what = f"overridden ({body.get('objection')}): {body.get('why')}" if body.get("override") else body.get("why")
    return [str(body.get("version")), str(body.get("previous") or "-"), "-", str(what)]


decisions = click.Group(
    "decisions", commands=[list_, show, verify, ranking, sign], help="What was decided, on what, and by whom."
)
