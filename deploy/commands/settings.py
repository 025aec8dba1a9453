"""help, config: what can be set, and what it means."""

from __future__ import annotations

import click

from deploy.config import describe, reference
from deploy.config.root import Settings


@click.command("help")
@click.argument("topic", required=False)
@click.pass_context
def help_(ctx: click.Context, topic: str | None) -> None:
    """Explain the settings of TOPIC, such as serve.engine; without one, list the topics.

    A topic is a section of the settings, one setting, or a command.
    """
    formatter = ctx.make_formatter()
    if topic is None:
        with formatter.section("Topics, each a section of the settings"):
            formatter.write_dl([(name, text) for name, text in reference.topics().items() if name.count(".") < 2])
        click.echo(formatter.getvalue().rstrip())
        return click.echo("\nmillrace help TOPIC: its settings. millrace COMMAND --help: a command.")
    topic = topic.replace("-", "_")
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    command = group.get_command(ctx, topic) if topic in group.commands else None
    rows = [(f"--{setting.key}", _meaning(setting)) for setting in reference.settings_in(topic)]
    if topic not in reference.topics() and not rows:
        if command is not None:
            assert ctx.parent is not None
            return click.echo(command.get_help(click.Context(command, info_name=topic, parent=ctx.parent)))
        near = describe.nearest(topic, Settings, group.commands)
        hint = f"did you mean {near}?" if near else "`millrace help` lists the topics"
        raise click.UsageError(f"there is no topic {topic}; {hint}")
    below = {name: text for name, text in reference.topics().items() if name.startswith(f"{topic}.")}
    if rows:
        meaning = reference.topics().get(topic, "").rstrip(".")
        with formatter.section(f"{topic}: {meaning}" if meaning else topic):
            formatter.write_dl(rows, col_max=44)
    if below:
        with formatter.section("More topics"):
            formatter.write_dl(list(below.items()))
    click.echo(formatter.getvalue().strip())
    if command is not None:
        click.echo(f"\nThe command of that name: millrace {topic} --help")


def _meaning(setting: describe.Setting) -> str:
    """A setting's description, type and default on one line."""
    default = "required" if setting.required else f"default: {describe.show(setting.default)}"
    return f"{describe.meaning(setting.description).replace('`', '')} [{reference.type_of(setting.key)}; {default}]"


@click.group()
def config() -> None:
    """Print what can be set."""


@config.command("reference")
@click.argument("section", default="")
def reference_(section: str) -> None:
    """Print every setting with its meaning, type and default, as YAML; or those of SECTION, such as serve.engine.

    Copy what you change into millrace.yaml. `millrace --print-config` prints what is in force.
    """
    click.echo(reference.as_yaml(section), nl=False)
