"""The command ``millrace``.

Settings can stand anywhere on the line as dotted options (``millrace up --serve.port 8001``). What fails is one
line on stderr: exit code 2 for a wrong command or configuration, 1 for everything else, 128 + n after signal n.
`train` ends with 3 where there was nothing to learn from, `estimate` where it can't tell.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections import UserDict
from pathlib import Path
from typing import Any, Final

import click

from deploy.config import describe, root
from deploy.config.root import ConfigError, Settings
from feedback.processes.exit import end_process
from feedback.processes.signals import Stopped
from feedback.trusted_code import consent_to
from feedback.user_code import search_last


class LazyCommands(UserDict[str, Any]):
    """Commands by name; each is imported, as module:attribute, on first use."""

    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = self.data[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


COMMANDS: Final = {
    "init": "deploy.commands.policy:init",
    "up": "deploy.commands.service:up",
    "serve": "deploy.commands.service:serve",
    "schedule": "deploy.commands.service:schedule",
    "score": "deploy.commands.loop:score",
    "train": "deploy.commands.loop:train",
    "evaluate": "deploy.commands.loop:evaluate",
    "estimate": "deploy.commands.gate.estimate:estimate",
    "cycle": "deploy.commands.loop:cycle",
    "policies": "deploy.commands.policy:policies",
    "reward-models": "deploy.commands.policy:reward_models",
    "runs": "deploy.commands.runs:runs",
    "promote": "deploy.commands.policy:promote",
    "rollback": "deploy.commands.policy:rollback",
    "history": "deploy.commands.policy:history",
    "keys": "deploy.commands.keys:keys",
    "lake": "deploy.commands.lake.group:lake",
    "data": "deploy.commands.lake.data:data",
    "suite": "deploy.commands.gate.suite:suite",
    "decisions": "deploy.commands.gate.decisions:decisions",
    "experiment": "deploy.commands.gate.experiment:experiment",
    "power": "deploy.commands.gate.decisions:power",
    "status": "deploy.commands.inspect:status",
    "report": "deploy.commands.inspect:report",
    "doctor": "deploy.commands.inspect:doctor",
    "plan": "deploy.commands.plan:plan",
    "monitoring": "deploy.commands.monitoring:monitoring",
    "help": "deploy.commands.settings:help_",
    "config": "deploy.commands.settings:config",
    "audit": "deploy.commands.audit:audit",
    "bench": "deploy.examples.bench.command:bench",
    "demo": "deploy.examples.demo.command:demo",
}
"""Where each command is."""

GROUPS: Final = {
    "Run": ("up", "status", "doctor", "plan", "init", "serve", "schedule", "monitoring", "demo"),
    "Turn the loop by hand": ("score", "train", "estimate", "evaluate", "cycle"),
    "Policies": (
        "policies",
        "promote",
        "rollback",
        "history",
        "decisions",
        "experiment",
        "power",
        "reward-models",
        "runs",
    ),
    "Data": ("lake", "data", "suite", "report"),
    "Settings": ("help", "config", "keys", "audit"),
}
"""The commands as `--help` lists them; all others follow."""


class Millrace(click.Group):
    """A group whose options may stand before or after the command, with the settings among them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest, general, options = _split(args)
        ctx.meta["millrace.options"] = options
        return super().parse_args(ctx, general + rest)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "query":
            raise click.UsageError("there is no command query; did you mean `millrace lake sql`?", ctx)
        if args[0] not in COMMANDS and (group := self._group_with(ctx, args[0])):
            raise click.UsageError(f"there is no command {args[0]}; did you mean `millrace {group} {args[0]}`?", ctx)
        return super().resolve_command(ctx, args)

    def _group_with(self, ctx: click.Context, name: str) -> str | None:
        """The group that has a command of this name."""
        groups = ((group, self.commands[group]) for group in COMMANDS)
        return next((of for of, group in groups if isinstance(group, click.Group) and name in group.commands), None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = {name for names in GROUPS.values() for name in names}
        for title, names in {**GROUPS, "More": tuple(name for name in COMMANDS if name not in listed)}.items():
            with formatter.section(title):
                width = formatter.width - 2 - max(map(len, COMMANDS))
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a newcomer's use, not of the alphabet


@click.group(
    cls=Millrace,
    commands=LazyCommands(COMMANDS),
    invoke_without_command=True,
    context_settings={"max_content_width": 120},
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with settings; millrace.yaml of this folder if it is there.",
)
@click.option("--print-config", is_flag=True, help="Print every setting with its meaning and value, as YAML, and exit.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="millrace", message="%(prog)s %(version)s")
@click.pass_context
def millrace(ctx: click.Context, file: Path | None, print_config: bool, debug: bool) -> None:
    """Serve a language model, learn from its users, prove the new policy better, swap it in.

    \b
    millrace up NAME_OR_FOLDER    serve a model and turn the loop, in this folder
    millrace status               what serves, what the loop does, what is wrong

    Every setting can be an option anywhere on the line (--serve.port 8001), stand in the environment
    (MILLRACE__SERVE__PORT=8001) or in a YAML file (serve: {port: 8001}); this is also their order, highest first.
    `millrace help TOPIC` explains a group of them, `millrace config reference` prints all.
    """
    if ctx.invoked_subcommand is None and not print_config:
        click.echo(ctx.get_help())
        return
    if ctx.invoked_subcommand in ("help", "config") and not print_config:
        return  # they explain settings, and work where the file can't be read
    settings = root.load(file, ctx.meta["millrace.options"])
    if print_config:
        click.echo(describe.to_yaml(settings, comments=True), nl=False)
        ctx.exit(0)
    search_last([Path.cwd()])
    consent_to(settings.train.model.trusted_code)
    ctx.obj = settings


def main() -> None:
    """Run the command line; the process's exit code says how it went."""
    os.environ["PYTHONSAFEPATH"] = "1"  # no Python below this one puts the working directory first on its path
    os.umask(os.umask(0o077) | 0o007)  # what people wrote is in most files of a home: others may read none of them
    end_process(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        return int(millrace.main(arguments, prog_name="millrace", standalone_mode=False) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        return _fail(error, arguments, code=2)
    except Stopped as stopped:
        click.echo(f"stopped by {stopped}", err=True)
        return stopped.code
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped by SIGINT", err=True)
        return 130
    except BrokenPipeError:  # `millrace policies | head`
        sys.stderr.close()
        return 141
    except Exception as error:  # noqa: BLE001  the last line of defence: everything ends as one line and an exit code
        return _fail(error, arguments, code=getattr(error, "exit_code", 1))


def _fail(error: Exception, arguments: list[str], *, code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exception(error)
    # Errors that are meant for the reader say it all; the name of any other is part of what it says.
    known = type(error).__module__.split(".")[0] in ("deploy", "serve", "feedback", "evaluation", "train")
    text = str(error) if known and str(error) else f"{type(error).__name__}: {error}"
    for line in text.splitlines():
        click.echo(f"error: {line}", err=True)
    if not known and "--debug" not in arguments:
        click.echo("(millrace --debug shows the traceback)", err=True)
    return code


def _split(args: list[str]) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """(the command's own arguments, the general options, the settings) of a command line, wherever each stands."""
    rest: list[str] = []
    general: list[str] = []
    settings: list[tuple[str, str]] = []
    words = iter(args)
    for word in words:
        if word == "--":
            rest += [word, *words]
            break
        name, equals, value = word.removeprefix("--").partition("=")
        is_setting = word.startswith("--") and ("." in name or name in _plain_settings())
        if not is_setting and (not word.startswith("--") or name not in ("config", "debug", "print-config")):
            rest.append(word)
        elif name in ("debug", "print-config"):
            general.append(word)
        else:
            if not equals:
                following = next(words, None)
                if following is None:
                    raise click.UsageError(f"--{name} needs a value")
                value = following
            if is_setting:
                settings.append((name, value))
            else:
                general += [f"--{name}", value]
    return rest, general, settings


def _plain_settings() -> set[str]:
    """Settings at the top, which have no dot in their name: ``--home``."""
    return {name for name, field in Settings.model_fields.items() if not describe.section_of(field.annotation)}


if __name__ == "__main__":
    main()
