"""monitoring: files for Prometheus and Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import click

from deploy.commands.common import pass_settings
from deploy.config.root import Settings


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    required=True,
    help="Folder to write them to; files of these names are replaced.",
)
@click.option(
    "--docs",
    default="docs",
    show_default=True,
    metavar="URL",
    help="Where this version's documentation is, for the links from alerts to what to do.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with an API key of scope admin, as Prometheus finds it; needed once there are keys.",
)
@pass_settings
def monitoring(settings: Settings, out: Path, docs: str, key_file: Path | None) -> None:
    """Write Prometheus' alert rules and configuration, and Grafana's dashboards."""
    from deploy.monitoring.alerts import rules, scrape_config
    from deploy.monitoring.dashboards import dashboards

    files = {
        "alerts.yaml": rules(docs),
        "prometheus.yaml": scrape_config(settings, "alerts.yaml", key_file),
        **{f"{name}.json": json.dumps(board, indent=2) + "\n" for name, board in dashboards().items()},
    }
    if not out.exists():
        out.mkdir(parents=True)
        out.chmod(0o755)  # Prometheus and Grafana are other users
    for name, text in files.items():
        (out / name).write_text(text)
        (out / name).chmod(0o644)
        click.echo(f"wrote {out / name}")
    if settings.schedule.metrics.port is None:
        click.echo("schedule.metrics.port is not set: the scheduler shows no metrics, and most of it stays empty")
