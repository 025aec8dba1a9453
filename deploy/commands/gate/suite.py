"""suite sample, suite add, suite show: the held-out prompts that policies are judged by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deploy.commands.common import as_json_option, json_out, pass_settings, write_result
from deploy.config.root import ConfigError, Settings
from deploy.supervise.children import NOTHING_TO_LEARN
from feedback.processes.signals import stop_on_signals

if TYPE_CHECKING:
    from evaluation.suites.held_out import HeldOut
    from evaluation.suites.suite import Item, Suite

_LOCK_TIMEOUT_S = 30.0


@click.command()
@click.option(
    "--items",
    type=click.IntRange(min=1),
    help="How many; evaluation.suite_items by default, or as many as there are down to evaluation.gate.min_items.",
)
@click.option("--replace", is_flag=True, help="Put it in the place of the suite that there is.")
@click.option(
    "--grow",
    is_flag=True,
    help="Keep the items of a drawn suite, and add others until so many are fresh: those that have decided on a "
    "candidate don't count.",
)
@click.option("--seed", type=int, help="Another seed draws other prompts; evaluation.seed by default.")
@json_out
@pass_settings
def sample(
    settings: Settings, items: int | None, replace: bool, grow: bool, seed: int | None, json_out: Path | None
) -> int:
    """Draw a suite from the prompts of traffic that no policy learns from (evaluation.holdout).

    One prompt of each conversation, at random; nothing that was imported, redacted or is being erased, and no prompt
    that has decided on a candidate, whichever suite it stood in. The items have
    no right answers: a judge or a reward model scores the answers to them. A cycle does the same, with --grow.

    Exit code 3 if there are too few prompts.
    """
    from evaluation.decisions.history import History, fresh_items
    from evaluation.suites.held_out import prompt_key
    from evaluation.suites.sampling import TooFewPrompts
    from evaluation.suites.sampling import sample as draw
    from evaluation.suites.suite import Suite, SuiteError
    from feedback.files import replace_file
    from feedback.ingest.seal import seal
    from serve.kv_cache import fit_batch_engine

    config = settings.resolved().evaluation
    if not config.holdout:
        raise ConfigError(
            "evaluation.holdout is 0, so that policies learn from all prompts: set it, such as to 0.1, to keep a share "
            "of them for the suite"
        )
    pointer = settings.policy_store().serving()
    if pointer is None:
        raise click.UsageError("no policy serves, whose tokenizer prompts need: run `millrace init --model FOLDER`")
    policy = settings.policy_store().get(pointer.version).path
    context = fit_batch_engine(config.engine, policy, section="evaluation.engine").max_model_len
    lake = settings.lake()
    with stop_on_signals(), _locked(config.suite):
        suite = Suite.load(config.suite) if config.suite.exists() and not replace else None
        if suite is not None and not (grow and suite.drawn):
            own = " with items or answers of your own" if grow else ""
            raise click.UsageError(f"there is a suite {config.suite}{own}: --replace puts another in its place")
        before = () if suite is None else suite.items
        history = History.of(settings.ledger().entries())
        fresh = 0 if suite is None else fresh_items(suite, history)
        more = max((items or config.suite_items) - fresh, 0)
        least = items or min(config.suite_items, config.gate.min_items)
        least = least if suite is None else min(more, config.gate.look_items)
        decided: tuple[Item, ...] = ()
        if suite is None and config.suite.exists():
            with suppress(SuiteError):  # it is replaced, whatever it is
                replaced = Suite.load(config.suite).items
                decided = tuple(item for item in replaced if prompt_key(item) in history.used)
        lake.create()
        seal(lake, Path(settings.resolved().feedback.journal.folder))
        try:
            drawn = draw(
                lake,
                policy,
                config.holdout,
                items=more,
                least=least,
                longest=None if context < 0 else context - min(config.max_tokens, context // 2),
                seed=config.seed if seed is None else seed,
                beside=(*before, *decided),
                used=history.used,
            )
        except TooFewPrompts as error:
            click.echo(f"{'error: ' if suite is None else ''}{error}", err=True)
            write_result({"items": len(before), "reason": str(error)}, json_out)
            return NOTHING_TO_LEARN
        if drawn.items:
            there = b"" if suite is None else config.suite.read_bytes().rstrip() + b"\n"
            replace_file(config.suite, there + drawn.content())
    click.echo(
        f"{config.suite}: {f'{len(before)} items and ' if before else ''}{len(drawn.items)} of {drawn.available} "
        f"{'other ' if before else ''}held-out prompts of traffic"
        + "".join(f", {count} {why} left out" for why, count in drawn.left_out.items())
    )
    if len(drawn.items) < more:
        click.echo("cycles add to it when there was more traffic, and so does millrace suite sample --grow")
    write_result(
        {"reason": None, "left_out": drawn.left_out, "available": drawn.available} | _shown(settings), json_out
    )
    return 0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@json_out
@pass_settings
def add(settings: Settings, file: Path, json_out: Path | None) -> None:
    """Add the items of FILE, a suite of its own, to the suite: all of them, or none.

    A bad line, or an id that the suite has, is named. Prompts need not be of the held-out slice: no policy learns from
    a suite's prompts. It may have learned from them before, though.
    """
    from evaluation.suites.suite import Suite, extend

    path = settings.resolved().evaluation.suite
    with _locked(path):
        added = Suite.load(file)
        extend(path, file)
    shown = _shown(settings)
    outside = len(added.items) - _in_slice(_held_out(settings), added)
    click.echo(f"{path}: {len(added.items)} items added, {shown['items']} in all")
    if outside:
        click.echo(f"{outside} of them are not of the held-out slice: policies may have learned from them until now")
    write_result(shown | {"added": len(added.items), "added_not_in_slice": outside}, json_out)


@click.command()
@as_json_option
@pass_settings
def show(settings: Settings, as_json: bool) -> None:
    """Say what the suite has: how many items, of which kind, and how many of the held-out slice."""
    shown = _shown(settings)
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(f"{shown['path']}: {shown['items']} items, sha256 {shown['sha256']}")
    click.echo(f"  {shown['text']} texts, {shown['chat']} chats, {shown['answers']} with an answer")
    click.echo(f"  {shown['in_slice']} of the held-out slice (evaluation.holdout={shown['holdout']:g})")
    click.echo(f"  {shown['fresh']} fresh: they have decided on no candidate yet")


def _shown(settings: Settings) -> dict[str, Any]:
    from evaluation.decisions.history import History, fresh_items
    from evaluation.suites.suite import Suite, SuiteError
    from feedback.scoring.sources.builtin import DEFAULT_REFERENCE

    path = settings.resolved().evaluation.suite
    if not path.exists():
        raise SuiteError(
            f"there is no suite yet: {path} is not there. `millrace suite sample` draws one from the held-out slice of "
            "traffic, as a cycle does by itself; `millrace suite add FILE` takes your own items"
        )
    suite = Suite.load(path)
    chats = sum(item.messages is not None for item in suite.items)
    return {
        "path": str(suite.path),
        "items": len(suite.items),
        "sha256": suite.sha256,
        "text": len(suite.items) - chats,
        "chat": chats,
        "answers": sum(DEFAULT_REFERENCE in item.scorer_metadata() for item in suite.items),
        "holdout": settings.evaluation.holdout,
        "in_slice": _in_slice(_held_out(settings), suite),
        "fresh": fresh_items(suite, History.of(settings.ledger().entries())),
    }


def _held_out(settings: Settings) -> HeldOut:
    from evaluation.suites.held_out import HeldOut

    store = settings.policy_store()
    pointer = store.serving()
    policy = None if pointer is None else store.get(pointer.version).path
    return HeldOut(policy=policy, share=settings.evaluation.holdout)


def _in_slice(held_out: HeldOut, suite: Suite) -> int:
    return sum(held_out.in_slice(item.as_row()) for item in suite.items)


@contextmanager
def _locked(suite: Path) -> Iterator[None]:
    from feedback.files import locked

    suite.parent.mkdir(parents=True, exist_ok=True)
    busy = click.UsageError(f"another process changes {suite}: try again")
    with locked(suite.with_name(f".{suite.name}.lock"), _LOCK_TIMEOUT_S, busy=busy):
        yield


suite = click.Group("suite", commands=[sample, add, show], help="The held-out prompts: draw them, add some, show them.")
