"""data export, data import: sets for other trainers from the lake, and sets of others into it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from deploy.commands.common import date_and_time, json_out, pass_settings, utc, write_result
from deploy.config.root import Settings
from feedback.exchange import ExportForm, ImportForm, Style
from feedback.processes.signals import stop_on_signals
from feedback.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from feedback.exchange.imports import Tokenise


def _source(_: click.Context, __: click.Parameter, name: str) -> str:
    from feedback.lake.erasure_registry import ANONYMOUS

    if not name or name == ANONYMOUS or not name.isascii() or not name.isprintable() or " " in name:
        raise click.BadParameter(
            f"{name!r} can't name an import: take printable ASCII characters without spaces, and not {ANONYMOUS!r}, "
            "which is the source of feedback that names none, and that no erasure reaches"
        )
    return name


@click.command("export")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@click.option("--format", "form", type=click.Choice(get_args(ExportForm)), required=True, help="What rows are.")
@click.option(
    "--prompts",
    "style",
    type=click.Choice(get_args(Style)),
    default="auto",
    show_default=True,
    help="Prompts as chat messages, or as the text that was tokenised; auto: messages if any prompt has them.",
)
@click.option(
    "--since",
    type=date_and_time,
    callback=utc,
    help="Only what is as young (UTC): feedback; requests.",
)
@click.option("--until", type=date_and_time, callback=utc, help="Only what is older (UTC).")
@click.option(
    "--policy", type=int, metavar="VERSION", help="Only responses that this policy sampled, to the last token."
)
@click.option("--tenant", help="Only of this tenant.")
@json_out
@pass_settings
def export(
    settings: Settings,
    out: Path,
    form: ExportForm,
    style: Style,
    since: datetime | None,
    until: datetime | None,
    policy: int | None,
    tenant: str | None,
    json_out: Path | None,
) -> None:
    """Write feedback, or prompts, as a set that `datasets` loads and TRL trains on.

    FILE is JSONL or Parquet, by its name, and is there whole or not at all. trl-preference: pairs, as DPO learns from;
    trl-kto: responses with thumbs; trl-sft: corrections; prompts: what was requested, with its metadata as columns.

    \b
    millrace data export pairs.jsonl --format trl-preference
    millrace data export prompts.parquet --format prompts --since 2026-03-01
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise click.BadParameter(f"{out.name} must end with .jsonl or .parquet", param_hint="FILE")
    if not out.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="FILE")

    from deploy.display.query_output import WRITERS, opened
    from feedback.exchange.export import Filter
    from feedback.exchange.export import export as from_lake
    from feedback.ingest.seal import seal
    from feedback.lake.query import Rows

    lake = settings.lake()
    lake.versions()  # raises if there is none
    with stop_on_signals():
        seal(lake, Path(settings.resolved().feedback.journal.folder))
        found = from_lake(lake, form, Filter(since, until, policy, tenant), style)
        with opened(out) as file:
            WRITERS[out.suffix[1:]](Rows(found.table.schema, iter(found.table.to_batches())), file)
    prompts = "chat messages" if found.conversational else "text"
    click.echo(f"{out}: {found.table.num_rows} rows of {form}, prompts as {prompts}{_left_out(found.left_out)}")
    result = {"file": out, "rows": found.table.num_rows, "left_out": found.left_out, "versions": found.versions}
    write_result(result, json_out)


@click.command("import")
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@click.option("--format", "form", type=click.Choice(get_args(ImportForm)), required=True, help="What rows are.")
@click.option(
    "--source",
    required=True,
    callback=_source,
    help="Name of the set: whose feedback it is, and the user to erase if it has to go.",
)
@click.option("--tenant", default="default", show_default=True, help="Tenant that the rows get.")
@click.option("--split", help="Which split of a dataset's folder with several.")
@json_out
@pass_settings
def import_(
    settings: Settings,
    path: Path,
    form: ImportForm,
    source: str,
    tenant: str,
    split: str | None,
    json_out: Path | None,
) -> None:
    """Add preferences, thumbs or demonstrations that others collected to the lake, for offline algorithms.

    PATH is a JSONL, Parquet or Arrow file, or a folder as `datasets` saves it. A broken line is named, and nothing is
    then imported. Repeated, it adds nothing twice. What feedback.capture.redact changes is left out. `millrace lake
    erase --user SOURCE` takes it out again.

    \b
    millrace data import ultrafeedback.parquet --format trl-preference --source ultrafeedback
    """
    from feedback.exchange.imports import import_set
    from feedback.redaction import Redactor

    lake = settings.lake()
    feedback = settings.resolved().feedback
    with stop_on_signals(), closing(Redactor(feedback.capture)) as redactor:
        if feedback.capture.redact:
            redactor.start()
        lake.create()
        imported = import_set(
            lake,
            Path(feedback.journal.folder),
            path,
            form,
            source=source,
            tokenise=_tokenise(settings),
            tenant=tenant,
            split=split,
            redactor=redactor if feedback.capture.redact else None,
        )
    click.echo(
        f"{path}: {imported.rows} rows; added {imported.responses} responses and {imported.feedback} feedback of "
        f"{source}{_left_out(imported.left_out)}"
    )
    write_result(asdict(imported), json_out)


def _tokenise(settings: Settings) -> Tokenise:
    """Prompts as the server would have them of the policy that serves. Raises click.UsageError if none does."""
    from feedback.exchange.record_files import RecordError
    from serve.generation.tokenizer import Text

    store = settings.policy_store()
    pointer = store.serving()
    if pointer is None:
        raise click.UsageError("no policy serves, whose tokenizer prompts need: run `millrace init --model FOLDER`")
    policy = store.get(pointer.version).path
    text = Text(load_tokenizer(policy))

    def tokenise(prompt: Any) -> tuple[str, str | None, list[int]]:
        if not isinstance(prompt, str) and not text.has_chat_template:
            raise RecordError(
                f"the prompt is chat messages, and policy {pointer.version}'s tokenizer has no chat template"
            )
        return text.prompt(prompt)

    return tokenise


def _left_out(counts: dict[str, int]) -> str:
    return f" (left out: {', '.join(f'{count} {why}' for why, count in counts.items())})" if counts else ""


data = click.Group("data", commands=[export, import_], help="Sets of prompts and feedback: write them, read them.")
