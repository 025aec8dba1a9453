"""status, report, doctor."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from deploy.commands.common import as_json_option, pass_settings
from deploy.config.root import Settings

COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it; home/report.html by default."
)
@click.option("--title", default="Millrace", show_default=True, help="The page's title.")
@pass_settings
def report(settings: Settings, out: Path | None, title: str) -> None:
    """Write one HTML page with what was done: policies, verdicts, experiments, promotions, training, traffic."""
    from deploy.display.report_data import gather
    from evaluation.report.page import build

    path = out or settings.path("report.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    build(gather(settings, title=title), path)
    click.echo(f"wrote {path}")


@click.command()
@as_json_option
@pass_settings
def status(settings: Settings, as_json: bool) -> int:
    """Show what serves and why, what the loop does, and what is wrong.

    Exit code 1 if something is wrong: there is no policy, `millrace up` runs and its server does not answer, the last
    cycle failed, and the like. A home in which nothing runs is not wrong.
    """
    from deploy.status import lines, look

    found = look(settings)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
    else:
        for title, text in lines(found):
            click.echo(f"{title:<14}{text}")
    return 1 if found.problems else 0


@click.command()
@as_json_option
@pass_settings
def doctor(settings: Settings, as_json: bool) -> int:
    """Check this machine and say what to change. Exit code 1 if something can't work."""
    from deploy.doctor import examine

    checks = examine(settings)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mark = click.style(f"{check.level:<4}", fg=COLOURS[check.level])
            click.echo(f"{mark}  {check.name:<{width}}  {check.found}")
            if check.advice:
                click.echo(f"{'':4}  {'':{width}}  -> {check.advice}")
    return 1 if any(check.level == "bad" for check in checks) else 0
