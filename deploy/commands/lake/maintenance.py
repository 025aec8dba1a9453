"""lake compact, vacuum, retain, erase, maintain, upgrade: what keeps the lake in order."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands.common import audited, dry_run_option, json_out, pass_settings, write_result
from deploy.config.root import Settings
from deploy.display.tables import table
from feedback.processes.signals import stop_on_signals

if TYPE_CHECKING:
    from deploy.loop.lineage import Trained
    from feedback.lake.upgrade import Upgraded
    from feedback.maintenance.maintain import Compacted, Retained, Vacuumed
    from train.run.recovery.unfinished import Stores


@click.command()
@json_out
@pass_settings
def compact(settings: Settings, json_out: Path | None) -> None:
    """Merge small files of each date into large ones, sorted by response id."""
    from feedback.maintenance.maintain import compact as compact_lake

    with stop_on_signals():
        done = compact_lake(settings.lake())
    _print_compacted(done)
    write_result({name: asdict(result) for name, result in done.items()}, json_out)


@click.command()
@dry_run_option
@json_out
@pass_settings
def vacuum(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Remove files that no version within lake.vacuum_hours needs, and what killed writers left."""
    from feedback.maintenance.maintain import vacuum as vacuum_lake

    with stop_on_signals():
        done = vacuum_lake(settings.lake(), dry_run=dry_run)
    _print_vacuumed(done, dry_run)
    write_result({name: asdict(result) for name, result in done.items()}, json_out)


@click.command()
@dry_run_option
@json_out
@pass_settings
def retain(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Drop whole dates, oldest first, as lake.retain_days and lake.retain_bytes say."""
    from evaluation.shadow.kept import FOLDER, forget_gone
    from feedback.maintenance.maintain import retain as retain_lake

    lake = settings.lake()
    with stop_on_signals():
        if dry_run:
            done = retain_lake(lake, dry_run=True)
        else:
            with audited(settings, "lake.retain") as outcome:
                done = retain_lake(lake)
                outcome.result = {"dates": done.dates}
            forget_gone(lake, settings.path(settings.evaluation.folder) / FOLDER, click.echo)
    _print_retained(done, dry_run)
    write_result(asdict(done), json_out)


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_out
@pass_settings
def upgrade(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
    """Take the tables of an older Millrace to this one's schema.

    A server may be up meanwhile. Interrupted or killed, run it again: it goes on where it was.
    """
    from feedback.lake.tables import NoLakeError
    from feedback.lake.upgrade import upgrade as upgrade_lake

    lake = settings.lake()
    with stop_on_signals():
        try:
            if not dry_run:
                lake.repair()  # containers upgrade before the server starts, which would otherwise do it
            done = list(upgrade_lake(lake, dry_run=True))
        except NoLakeError:
            click.echo(f"there is no lake at {lake.uri}: the server makes it when it starts")
            return
        if dry_run:
            for step in done:
                _print_upgraded(step, "would be taken")
        elif done:
            with audited(settings, "lake.upgrade") as outcome:
                for step in upgrade_lake(lake):
                    _print_upgraded(step, "taken")
                    outcome.result[step.table] = step.to
    if not done:
        click.echo("the lake has this Millrace's schema already")
    write_result({"upgraded": [asdict(step) for step in done]}, json_out)


@click.command()
@json_out
@pass_settings
def maintain(settings: Settings, json_out: Path | None) -> None:
    """Finish erasures, drop old dates, compact and vacuum: what the schedule runs."""
    from deploy.loop import lineage
    from evaluation.shadow.kept import FOLDER, forget_gone
    from feedback.maintenance.maintain import maintain as maintain_lake
    from train.run.recovery.unfinished import forget_erased, forget_erased_in_store

    lake, resolved, stores = settings.lake(), settings.resolved(), settings.stores()

    def rewritten(erasure: str, since: Mapping[str, int]) -> None:
        reached = lineage.trained_before_erasure(stores, lake, since)
        _record(stores, erasure, reached, retrain=_marks(stores, erasure))
        _print_reached(reached)

    with stop_on_signals():
        lake.create()
        done = maintain_lake(lake, Path(resolved.feedback.journal.folder), rewritten)
        forgotten = forget_erased(lake, resolved.train.runs, stores)
        forget_gone(lake, resolved.evaluation.folder / FOLDER, click.echo)
        if (shared := settings.run_store()) is not None:
            forgotten += forget_erased_in_store(lake, shared, stores)
    if any(done.erased.values()):
        click.echo(f"erased, behind an earlier erasure: {_counted(done.erased)}")
    _print_retained(done.retained, dry_run=False)
    _print_compacted(done.compacted)
    _print_vacuumed(done.vacuumed, dry_run=False)
    _print_forgotten(forgotten)
    write_result(asdict(done), json_out)


@click.command()
@click.option("--user", metavar="USER", help="Rows of this user; with --tenant, of this tenant's user only.")
@click.option("--tenant", metavar="TENANT", help="All rows of this tenant.")
@click.option("--response-id", metavar="ID", help="One response, and the feedback on it.")
@click.option(
    "--mark-for-retraining",
    "retrain",
    is_flag=True,
    help="Mark the policies and reward models: the next cycle starts from an ancestor that has not seen the rows.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for a server's open journal segments."
)
@json_out
@pass_settings
def erase(
    settings: Settings,
    user: str | None,
    tenant: str | None,
    response_id: str | None,
    retrain: bool,
    yes: bool,
    wait_s: float,
    json_out: Path | None,
) -> None:
    """Remove rows from journal and lake for good, and list the policies, reward models and runs that have read them.

    Older versions of the tables can't be read afterwards. Policies and reward models are not touched; their records say
    that an erasure reaches them. A run at work will publish nothing; what a killed one has kept is removed.
    """
    from deploy.loop import lineage
    from evaluation.shadow.kept import FOLDER, forget_gone
    from feedback.maintenance.erasure import Target, earlier, find
    from feedback.maintenance.erasure import erase as erase_rows
    from serve.policies.store import PolicyError
    from train.run.recovery.unfinished import forget_erased, forget_erased_in_store

    try:
        target = Target(user=user, tenant=tenant, response_id=response_id)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    resolved = settings.resolved()
    lake, journal = settings.lake(), Path(resolved.feedback.journal.folder)
    with stop_on_signals():
        found = find(lake, journal, target)
        # Looked up first: the versions that a policy was trained from can't be read after the erasure.
        stores, runs = settings.stores(), resolved.train.runs
        known = lineage.artifacts(stores)
        reached = lineage.trained_on(stores, lake, found)
        reading = lineage.runs_with(runs, lake, found)
        click.echo(f"to be erased: {_counted(found.rows)}")
        _print_reached(reached, none=True)
        _list("unfinished run", [[r.name, r.certainty, f"{r.why}; {_fate(settings, r.holder)}"] for r in reading])
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("erasing needs a confirmation, and there is no terminal: give --yes")
            click.confirm("Erase for good? Older versions of the lake can't be read afterwards", abort=True)
        if retrain and (marked := _mark(stores, earlier(lake, journal, target))):
            click.echo(f"marked for retraining, as an earlier erasure of the same reaches it: {', '.join(marked)}")
        late: list[Trained] = []

        def registered(erasure: str) -> None:  # before the rows go: afterwards it can't be known for certain
            try:
                _record(stores, erasure, reached, retrain=retrain)
            except (OSError, PolicyError) as error:
                click.echo(f"recorded when the rows are gone: {error}")

        def rewritten(erasure: str, since: Mapping[str, int]) -> None:
            late.extend(lineage.trained_before_erasure(stores, lake, since, besides=known, parents=reached))
            _record(stores, erasure, [*reached, *late], retrain=retrain)

        # Of whom is in neither the log nor the lake afterwards.
        by = [name for name, value in asdict(target).items() if value is not None]
        with audited(settings, "lake.erase", by=by, retrain=retrain) as outcome:
            done = erase_rows(
                lake, journal, target, wait_s=wait_s, report=click.echo, registered=registered, rewritten=rewritten
            )
            outcome.result = {"rows": done.rows, "policies": [one.name for one in reached if one.kind == "policy"]}
        _print_reached(late)
        _print_forgotten(forget_erased(lake, runs, stores))
        if (shared := settings.run_store()) is not None:
            try:
                _print_forgotten(forget_erased_in_store(lake, shared, stores))
            except PolicyError as error:  # the rows are gone by now: that must be reported
                click.echo(f"warning: the next `millrace lake maintain` removes what runs have kept: {error}", err=True)
        forget_gone(lake, resolved.evaluation.folder / FOLDER, click.echo)
    click.echo(f"erased: {_counted(done.rows)} in {done.seconds:.1f} s")
    suite = settings.path(settings.evaluation.suite)
    if settings.evaluation.holdout and suite.exists():
        click.echo(
            f"{suite} may hold prompts that were theirs: draw it again with `millrace suite sample --replace`; so may "
            f"what came of it, for you to remove: {resolved.evaluation.folder} (its cache too), and reports"
        )
    if done.damaged:
        click.echo(f"removed {done.damaged} damaged journal segments that had been put aside")
    for path in done.left:
        click.echo(f"left until it is lake.orphan_hours old, as a writer may be about to commit it: {path}")
    result = asdict(done) | {"policies": [], "reward_models": [], "evaluation_reward_models": [], "runs": []}
    for one in (*reached, *late, *reading):
        how = {"certainty": one.certainty, "why": one.why}
        if one.kind == "policy":
            result["policies"].append({"version": int(one.name), **how})
        elif one.kind != "unfinished run":
            result[f"{one.kind}s".replace(" ", "_")].append({"version": int(one.name), **how})
        else:
            result["runs"].append({"name": one.name, "holder": one.holder, **how})
    write_result(result, json_out)


def _list(what: str, rows: list[list[str]]) -> None:
    """What of a kind has read the rows, and how that is known."""
    click.echo(table([what, "trained on them", "because"], rows) if rows else f"no {what} was trained on them")


def _fate(settings: Settings, holder: str | None) -> str:
    if holder is None:
        return "it was killed: what it has kept is removed"
    refused = settings.train.erased_rows == "refuse"
    return f"{holder} is at work on it: {'it will publish nothing' if refused else 'its policy will say so'}"


def _mark(stores: Stores, erasures: Collection[str]) -> list[str]:
    """Mark for retraining what these erasures are on record with, and what that was; not what they have marked."""
    from deploy.loop.lineage import stores_by_kind

    marked = []
    for kind, store in stores_by_kind(stores).items():
        for policy in map(store.get, store.versions()):
            for one in policy.erasures:
                if one.get("erasure") in erasures and not one.get("retrain"):
                    how = {name: one[name] for name in ("certainty", "why", "erasure")}
                    store.record_erasure(policy.version, retrain=True, **how)
                    marked.append(f"{kind} {policy.version}")
    return marked


def _marks(stores: Stores, erasure: str) -> bool:
    """Whether a killed erasure has marked for retraining what it had recorded with policies and reward models."""
    from serve.policies.records import read_json

    stores.policies.versions()  # brings the copy of a shared store up to date
    files = [file for store in vars(stores).values() for file in store.root.glob("v*/erasures.json")]
    records = (record for file in files for record in (read_json(file) or {}).get("erasures", ()))
    return any(record.get("erasure") == erasure and record.get("retrain") for record in records)


def _record(stores: Stores, erasure: str, reached: Iterable[Trained], *, retrain: bool) -> None:
    """Record an erasure with the policies and reward models that it reaches, once; not with one that was withdrawn.

    Raises PolicyError, when the others are recorded, for those that could not be.
    """
    from deploy.loop.lineage import stores_by_kind
    from serve.policies.store import PolicyError, PolicyNotFound

    failed = []
    for one in reached:
        how = {"certainty": one.certainty, "why": one.why}
        try:
            store = stores_by_kind(stores)[one.kind]
            store.record_erasure(int(one.name), retrain=retrain, erasure=erasure, **how)
        except PolicyNotFound:
            continue
        except (OSError, PolicyError) as error:
            failed.append(f"{one.kind} {one.name}: {error}")
    if failed:
        raise PolicyError(
            f"the erasure could not be recorded with {'; '.join(failed)}. Fix that; `millrace lake maintain` records it"
        )


def _print_reached(reached: Iterable[Trained], *, none: bool = False) -> None:
    """The policies and reward models; with ``none`` also that there is no such thing."""
    for kind in ("policy", "reward model", "evaluation reward model"):
        rows = [[one.name, one.certainty, one.why] for one in reached if one.kind == kind]
        if rows or (none and kind != "evaluation reward model"):
            _list(kind, rows)


def _print_forgotten(runs: list[str]) -> None:
    if runs:
        click.echo(f"removed what killed runs had kept of rows that are gone: {', '.join(runs)}")


def _print_compacted(done: dict[str, Compacted]) -> None:
    for name, result in done.items():
        left = f", {result.conflicts} groups left for the next time" if result.conflicts else ""
        click.echo(
            f"{name}: {result.files_before} small files became {result.files_after} ({result.rows} rows, "
            f"{_megabytes(result.bytes_before)} to {_megabytes(result.bytes_after)}, {result.seconds:.1f} s){left}"
        )


def _print_vacuumed(done: dict[str, Vacuumed], dry_run: bool) -> None:
    for name, result in done.items():
        click.echo(
            f"{name}: {'would remove' if dry_run else 'removed'} {len(result.replaced)} replaced files and "
            f"{len(result.orphans)} that no version names ({_megabytes(result.bytes)}), {len(result.log)} log entries"
        )
        if dry_run:
            for path in (*result.replaced, *result.orphans):
                click.echo(f"  {path}")


def _print_upgraded(step: Upgraded, taken: str) -> None:
    changes = "".join(f"; {change}" for change in step.changes)
    click.echo(f"{step.table}: {taken} to schema version {step.to}{changes}")


def _print_retained(done: Retained, dry_run: bool) -> None:
    if not done.dates:
        click.echo("no date is due to be dropped")
        return
    click.echo(
        f"{'would drop' if dry_run else 'dropped'} {len(done.dates)} dates, {done.dates[0]} to {done.dates[-1]}: "
        f"{_counted(done.rows)} ({_megabytes(sum(done.bytes.values()))}), and of other dates what is about these "
        f"interactions: {_counted(done.later)}"
    )


def _counted(rows: dict[str, Any]) -> str:
    return ", ".join(f"{count} {name}" for name, count in rows.items())


def _megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
