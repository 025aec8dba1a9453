"""init, promote, rollback, history: the policy store; policies, reward-models: what is kept of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from deploy import initialise
from deploy.commands.common import (
    as_json_option,
    audited,
    dry_run_option,
    json_out,
    pass_settings,
    write_result,
)
from deploy.config.root import Settings
from deploy.config.sources import DEFAULT_FILE
from deploy.display.tables import print_table
from deploy.loop import promotion
from deploy.loop.lineage import parents_of_runs
from serve.policies.retention import Kept, weights_bytes
from serve.policies.store import Pointer, Policy, PolicyError, PolicyStore, RecordDamaged
from serve.policies.whole_policies import whole

Stores = Callable[[Settings], dict[str, Kept]]
"""What each store of a kind keeps, by what it is for."""


@click.command()
@click.option("--model", required=True, metavar="NAME_OR_FOLDER", help="A folder, or a name on the Hugging Face hub.")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit on the hub.")
@click.option("--write-config/--no-write-config", default=True, help="Write a short millrace.yaml if there is none.")
@pass_settings
@click.pass_context
def init(ctx: click.Context, settings: Settings, model: str, revision: str | None, write_config: bool) -> None:
    """Make a Hugging Face causal LM policy 1, in a new home."""
    pointer = initialise.initialise(settings, model, revision=revision, who=promotion.person())
    click.echo(f"policy {pointer.version} of {settings.home} is {model}")
    if write_config and initialise.write_config(settings, DEFAULT_FILE, ctx.meta["millrace.options"]):
        click.echo(f"wrote {DEFAULT_FILE}: the settings that matter most; `millrace config reference` prints all")
        if (tokens := initialise.fit_responses(settings, DEFAULT_FILE)) is not None:
            click.echo(initialise.SHORT_CONTEXT.format(tokens=tokens))
    click.echo("serve it and turn the loop with: millrace up; serve it alone with: millrace serve")


wait = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the configured server serves it, if it runs."
)


@click.group(invoke_without_command=True)
@as_json_option
@pass_settings
@click.pass_context
def policies(ctx: click.Context, settings: Settings, as_json: bool) -> None:
    """List the policies and show which one serves."""
    if ctx.invoked_subcommand is not None:
        return
    store = settings.policy_store()
    pointer = store.serving()
    found, damaged = [], []
    for version in store.versions():
        try:
            found.append(store.get(version))
        except PolicyError as error:  # the others are as good as before
            damaged.append(str(error))
    for text in damaged:
        click.echo(f"damaged: {text}", err=True)
    if as_json:
        click.echo(json.dumps([_as_json(policy, pointer) for policy in found], indent=2))
        return
    rows = [
        [
            "*" if pointer and pointer.version == policy.version else "",
            *_columns(policy, str(policy.parent or "-")),
            _gate(policy),
        ]
        for policy in found
    ]
    empty = "" if damaged else f"no policies in {store.root}: run `millrace init --model NAME_OR_FOLDER`"
    print_table(["serves", "version", "parent", "created (UTC)", "size", "state", "gate"], rows, empty)
    for policy in found:
        for erasure in policy.erasures:
            click.echo(
                f"policy {policy.version}: rows that it was trained on ({erasure['certainty']}) were erased at "
                f"{erasure['at'][:19]}: {erasure['why']}"
                f"{'; marked for retraining' if erasure.get('retrain') else ''}"
            )
        if lost := policy.lineage.get("erased_rows"):
            click.echo(f"policy {policy.version}: rows were erased while it was trained: {lost}")
    if pointer:
        since = f"{pointer.at[:19].replace('T', ' ')} UTC"
        click.echo(f"\npolicy {pointer.version} serves since {since} ({pointer.who}: {pointer.why})")
        if any(policy.marked for policy in found if policy.version == pointer.version):
            click.echo(
                "it is marked for retraining: cycles train from one that is not, until a candidate passes the gate"
            )


@click.group("reward-models", invoke_without_command=True)
@as_json_option
@pass_settings
@click.pass_context
def reward_models(ctx: click.Context, settings: Settings, as_json: bool) -> None:
    """List the reward models that were trained, and show which one rewards."""
    if ctx.invoked_subcommand is not None:
        return
    rows, listed = [], []
    for of, kept in _reward_models(settings).items():
        pointer = kept.store.serving()
        for model in map(kept.store.get, kept.store.versions()):
            agreement = model.metrics.get("agreement") or {}
            shown = "{value:.1%} [{low:.1%}, {high:.1%}] of {judgements}".format(**agreement) if agreement else "-"
            rewards = "*" if pointer and pointer.version == model.version else ""
            policy = str(model.lineage.get("policy", "-"))
            rows.append([rewards, of, *_columns(model, policy), shown])
            listed.append({"of": of, **_as_json(model, pointer), "policy": model.lineage.get("policy")})
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    columns = ["rewards", "of", "version", "policy", "created (UTC)", "size", "state", "agreement"]
    print_table(columns, rows, "no reward model was trained yet: cycle.recipe rlhf trains one")


def _policies(settings: Settings) -> dict[str, Kept]:
    from train.run.recovery.unfinished import needed_by_runs

    store, runs = settings.policy_store(), settings.resolved().train.runs

    def needed() -> dict[int, str]:
        measured = _first_policies(store) if settings.evaluation.gate.guardrails.kl_v1 is not None else {}
        by_runs = needed_by_runs(runs, store, "was started with it") | parents_of_runs(runs)
        adapters = settings.serve.engine.adapters
        tenants = {} if adapters is None else adapters.tenants
        own = {version: f"serve.engine.adapters.tenants: it answers {tenant}" for tenant, version in tenants.items()}
        return own | _named(settings, store) | measured | by_runs

    return {"": Kept(store, settings.serve.retention, needed)}


def _first_policies(store: PolicyStore) -> dict[int, str]:
    """Those that lineages began with, to which evaluations measure KL."""
    found = map(store.get, store.versions())
    return {one.version: "evaluation.gate.guardrails.kl_v1 measures KL to it" for one in found if one.parent is None}


def _reward_models(settings: Settings) -> dict[str, Kept]:
    """By what they are for."""
    from train.run.recovery.unfinished import needed_by_runs

    train, stores = settings.resolved().train, settings.stores()

    def needed(store: PolicyStore) -> dict[int, str]:
        return _named(settings, store) | needed_by_runs(train.runs, store, "is rewarded by it")

    return {
        of: Kept(store, train.reward_model.retention, partial(needed, store), rewards=True)
        for of, store in (("train", stores.reward_models), ("evaluate", stores.evaluation_reward_models))
    }


def _named(settings: Settings, store: PolicyStore) -> dict[int, str]:
    """Version -> which setting names its folder, of those that reward or that a critic begins with, in all stages."""
    from train.run.recovery.unfinished import named_versions

    named: dict[int, str] = {}
    for own in (settings, *map(settings.of_stage, settings.cycle.stages)):
        scoring, train = own.feedback.scoring.resolved(own.path), own.train.resolved(own.path)
        record = {"feedback": {"scoring": scoring.model_dump(mode="json")}, "train": train.model_dump(mode="json")}
        named = named_versions(record, store) | named
    return {version: f"{setting} names it" for version, setting in named.items()}


def _with_retention(group: click.Group, what: str, plural: str, setting: str, stores: Stores) -> None:
    """Add the commands ``prune``, ``pin`` and ``unpin`` to a group."""
    stem = what.replace(" ", "_")
    several = click.option("--of", default="", help="Which of several stores it is in, as the list names them.")

    def chosen(settings: Settings, of: str) -> PolicyStore:
        found = stores(settings)
        if of and of not in found:
            raise click.UsageError(f"--of {of}: there is no such store; there are: {', '.join(found)}")
        return found[of or next(iter(found))].store

    @group.command(
        help=f"Remove the weights of {plural} that {setting} doesn't keep; their manifests stay.\n\n"
        "The schedule does it after the lake's maintenance."
    )
    @dry_run_option
    @json_out
    @pass_settings
    def prune(settings: Settings, dry_run: bool, json_out: Path | None) -> None:
        results = {}
        for of, kept in stores(settings).items():
            stay, left = kept.reasons(), dict[int, str]()
            if dry_run:
                found = map(kept.store.get, kept.store.versions())
                gone = [one for one in found if not one.pruned and one.version not in stay]
            else:
                with audited(settings, f"{stem}.prune", of=of) as outcome:
                    gone, left = kept.prune()
                    outcome.result = {"versions": [one.version for one in gone]}
            named = f" of {of}" if of and len(stores(settings)) > 1 else ""
            for version, reason in sorted((stay | left).items()):
                click.echo(f"{what} {version}{named}: kept ({reason})")
            size = sum(map(weights_bytes, gone)) / 2**20
            listed = ", ".join(str(one.version) for one in gone) or "none"
            verb = "would remove" if dry_run else "removed"
            click.echo(f"{verb} the weights of {plural}{named}: {listed} ({size:.1f} MiB)")
            versions = [one.version for one in gone]
            results[of] = {"removed": versions, "kept": stay | left, "bytes": int(size * 2**20), "dry_run": dry_run}
        write_result(results.get("", results), json_out)

    @group.command(help=f"Keep the weights of {what} VERSION until it is unpinned.")
    @click.argument("version", type=int)
    @click.option("--why", required=True, help="For the record.")
    @pass_settings
    def pin(settings: Settings, version: int, why: str, of: str = "") -> None:
        with audited(settings, f"{stem}.pin", version=version, of=of, why=why):
            chosen(settings, of).pin(version, who=promotion.person(), why=why)
        click.echo(f"{what} {version} is pinned")

    @group.command(help=f"Leave {what} VERSION to retention again.")
    @click.argument("version", type=int)
    @pass_settings
    def unpin(settings: Settings, version: int, of: str = "") -> None:
        with audited(settings, f"{stem}.unpin", version=version, of=of):
            chosen(settings, of).unpin(version)
        click.echo(f"{what} {version} is not pinned")

    if what != "policy":
        several(pin)
        several(unpin)


_with_retention(policies, "policy", "policies", "serve.retention", _policies)


@policies.command()
@click.argument("version", type=int)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@pass_settings
def export(settings: Settings, version: int, folder: Path) -> None:
    """Write policy VERSION to FOLDER as one Hugging Face model, an adapter merged into its base."""
    store = settings.policy_store()
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{folder} is not empty")
    with store.hold(version):
        store.verify(version)
        policy = whole(store.get(version))
        for name in policy.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(policy.path / name, folder / name)
    click.echo(f"policy {version} is in {folder}")


_with_retention(reward_models, "reward model", "reward models", "train.reward_model.retention", _reward_models)


@click.command()
@click.argument("version", type=int)
@click.option("--why", help="For the record.")
@click.option("--override", is_flag=True, help="Promote without a passing verdict of the gate; needs --why.")
@wait
@pass_settings
def promote(settings: Settings, version: int, why: str | None, override: bool, wait: bool) -> None:
    """Make policy VERSION the one that serves, and wait until the running server, or fleet, has followed."""
    _require_reason(override, why)
    store, ledger = settings.policy_store(), settings.ledger()
    with audited(settings, "policy.promote", version=version, why=why, override=override) as outcome:
        pointer = promotion.promote(
            store, ledger, version, who=promotion.person(), why=why or "promoted by hand", override=override
        )
        outcome.result = {"generation": pointer.generation}
    promotion.record_moves(store, ledger)
    _wait(settings, store, pointer, wait=wait)


@click.command()
@click.option("--to", type=int, metavar="VERSION", help="Go back to this policy instead of the one before.")
@click.option("--why", help="For the record.")
@click.option("--override", is_flag=True, help="Go back to a policy that has not served, too; needs --why.")
@wait
@pass_settings
def rollback(settings: Settings, to: int | None, why: str | None, override: bool, wait: bool) -> None:
    """Go back to a policy that has served, and wait until the running server, or fleet, has followed."""
    _require_reason(override, why)
    store = settings.policy_store()
    with audited(settings, "policy.rollback", to=to, why=why, override=override) as outcome:
        pointer = promotion.rollback(
            store, who=promotion.person(), why=why or "rolled back by hand", to=to, override=override
        )
        outcome.result = {"version": pointer.version, "generation": pointer.generation}
    promotion.record_moves(store, settings.ledger())
    _wait(settings, store, pointer, wait=wait)


@click.command()
@as_json_option
@pass_settings
def history(settings: Settings, as_json: bool) -> None:
    """List the promotions and rollbacks: when, by whom, why, by which verdict, and whether they served; newest last."""
    store = settings.policy_store()
    pointers = store.history()
    outcomes: dict[int, bool] = {}
    try:
        for outcome in store.outcomes():  # of several servers, one that refuses a policy is enough
            outcomes[outcome.generation] = outcomes.get(outcome.generation, True) and outcome.served
    except RecordDamaged as error:
        click.echo(f"whether they have served is not known: {error}", err=True)
    if as_json:
        moves = [asdict(pointer) | {"served": outcomes.get(pointer.generation)} for pointer in pointers]
        click.echo(json.dumps(moves, indent=2))
        return
    rows = [
        [
            pointer.at[:19].replace("T", " "),
            str(pointer.version),
            "-" if pointer.previous is None else str(pointer.previous),
            _SERVED[outcomes.get(pointer.generation)],
            pointer.who,
            _verdict(pointer),
            pointer.why,
        ]
        for pointer in pointers
    ]
    empty = f"nothing has served in {store.root}: run `millrace init --model NAME_OR_FOLDER`"
    print_table(["at (UTC)", "policy", "before", "served", "who", "gate", "why"], rows, empty)


_SERVED = {True: "yes", False: "refused", None: "-"}


def _require_reason(override: bool, why: str | None) -> None:
    if override and not (why and why.strip()):
        raise click.UsageError("--override needs --why: it goes on record")


def _verdict(pointer: Pointer) -> str:
    verdict = pointer.verdict or {}
    back = f"back from {verdict['rollback_from']}" if "rollback_from" in verdict else None
    if verdict.get("override"):
        return f"{f'{back}, ' if back else ''}overridden ({verdict.get('objection')})"
    return back or (f"{verdict['verdict']} against {verdict.get('incumbent')}" if "verdict" in verdict else "-")


def _wait(settings: Settings, store: PolicyStore, pointer: Pointer, *, wait: bool) -> None:
    from deploy.loop.wait_for_serving import server_policy, wait_until_served

    before = f" (before: {pointer.previous})" if pointer.previous is not None else ""
    if not wait:
        return click.echo(f"the pointer names policy {pointer.version}{before}; running servers follow")
    if server_policy(settings) is None:
        return click.echo(
            f"the pointer names policy {pointer.version}{before}; no server answers at {settings.server_url}, it will "
            "serve that when it starts"
        )
    wait_until_served(settings, store, pointer, say=partial(click.echo, err=True))
    click.echo(f"policy {pointer.version} serves{before}")


def _columns(policy: Policy, parent: str) -> list[str]:
    """Version, parent, created, size and state."""
    adapter = "" if policy.base is None else f"adapter of {policy.base['version']}"
    states = {adapter: policy.base, "pruned": policy.pruned, "pinned": policy.pinned, "marked": policy.marked}
    size = sum(file["size"] for file in policy.files.values()) / 2**20
    state = ", ".join(name for name, holds in states.items() if holds)
    return [str(policy.version), parent, policy.created_at[:19].replace("T", " "), f"{size:.1f} MiB", state]


def _gate(policy: Policy) -> str:
    if not policy.gate:
        return "-"
    verdict = policy.gate
    low, high = verdict.get("ci_low"), verdict.get("ci_high")
    interval = f" {verdict.get('difference', 0):+.3f} [{low:+.3f}, {high:+.3f}]" if low is not None and high else ""
    return f"{verdict.get('verdict')} against {verdict.get('incumbent')}{interval}"


def _as_json(policy: Policy, pointer: Pointer | None) -> dict[str, object]:
    return {
        "version": policy.version,
        "parent": policy.parent,
        "serves": bool(pointer and pointer.version == policy.version),
        "created_at": policy.created_at,
        "path": str(Path(policy.path)),
        "base": policy.base,
        "lineage": policy.lineage,
        "metrics": policy.metrics,
        "gate": policy.gate,
        "erasures": policy.erasures,
        "marked": policy.marked,
        "pinned": policy.pinned,
        "pruned": policy.pruned,
    }
