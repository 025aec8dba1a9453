"""The reference pages, written from the code while mkdocs builds: settings, commands, HTTP, tables.

A hook of mkdocs (``hooks`` in mkdocs.yml). Nothing here is committed as text: what the code says is what the page says.
But for the settings' schema, each part of the product is imported in one function, at its beginning.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from deploy.config.json_schema import Schema, at, code, link, sections, text, type_of

if TYPE_CHECKING:
    import click

COLUMNS: Final = {
    "interactions": {
        "response_id": "Id of the response, a UUIDv7; choice i of several is `U:i`.",
        "request_id": "Id of the request that it answers.",
        "session_id": "Your name for the conversation.",
        "user": "Your name for the person.",
        "tenant": "Tenant of the key that the request came with.",
        "endpoint": "Route that was called.",
        "replica": "Server that answered.",
        "variant": "In an experiment `candidate` or `control`, or `fallback` if it was answered outside of the draw; "
        "`canary` if any token is from a policy on trial in one replica.",
        "created_at": "When the request came, UTC.",
        "completed_at": "When the response ended, UTC.",
        "messages": "Chat messages of the request, as JSON text; null if it had none.",
        "prompt": "Text that was tokenised; null if the request brought token ids.",
        "prompt_token_ids": "Tokens of the prompt.",
        "response": "Text of the response.",
        "response_token_ids": "Tokens of the response, as sampled.",
        "logprobs": "Log-probability of each response token when it was sampled, in nats.",
        "policy_spans": "Policy that sampled each token: from token `start` on, `policy_version`.",
        "sampling": "Sampling parameters of the request.",
        "finish_reason": "`stop`, `length` or `abort`; null on error.",
        "status": "`complete`, `aborted`, `error`; `redacted`: complete, but its texts were changed, so that it is "
        "neither scored nor trained on; `imported`: a text that no policy here sampled.",
        "timings": "Milliseconds in the queue, to the first token and in all.",
        "metadata": "Texts that the request brought.",
        "experiment": "Number of the experiment that the request was part of.",
        "propensity": "Probability with which its variant was drawn.",
    },
    "feedback": {
        "feedback_id": "Id of the feedback; yours if you gave one.",
        "response_id": "Response that it is about.",
        "kind": "`thumb`, `rating`, `preference`, `correction`, `comment` or `metric`.",
        "value": "Number of a thumb, rating or metric.",
        "text": "Text of a correction or comment.",
        "name": "Rating scale or metric.",
        "rejected_response_id": "Response that a preference rejects.",
        "source": "Who judged.",
        "tenant": "Tenant of the key that the request came with.",
        "created_at": "When it came, UTC.",
    },
    "rewards": {
        "response_id": "Response that was scored.",
        "reward": "Weighted mean of the components; null if every one is missing.",
        "components": "Value of each component.",
        "missing": "Components without a value, and why.",
        "scorer": "Name and content hash of the scoring settings.",
        "scored_at": "When it was scored, UTC.",
    },
}
"""Meaning of each column; the names and types are the code's."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of the folder."""
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


# --------------------------------------------------------------------------------------------------------- settings


def settings() -> str:
    """Every setting, by section."""
    from deploy.config import describe
    from deploy.config.root import Settings

    schema = Settings.model_json_schema()
    meanings = dict(sections(schema))
    by_section: dict[str, list[str]] = {}
    for setting in describe.settings_of(Settings):
        section, _, name = setting.key.rpartition(".")
        default = "required" if setting.required else code(describe.show(setting.default))
        kind = type_of(at(schema, setting.key), schema)
        row = f"| `{name}`{{ #{setting.key} }} | {cell(setting.description)} | {kind} | {default} |"
        by_section.setdefault(section, []).append(row)
    return "\n".join(_settings_page(by_section, meanings))


def _settings_page(by_section: Mapping[str, list[str]], meanings: Mapping[str, str]) -> Iterator[str]:
    yield "# Settings\n"
    yield (
        "Give a setting on the command line (`--serve.port 8001`), in the environment (`MILLRACE__SERVE__PORT=8001`) "
        "or in `millrace.yaml` (`serve: {port: 8001}`). The command line wins over the environment, and that over the "
        "file. `NAME` in a key stands for a name of your own. `millrace --print-config` prints the settings in force.\n"
    )
    seen: set[str] = set()
    for section, rows in by_section.items():
        parts = section.split(".") if section else []
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            if above not in seen and above not in by_section and above in meanings:
                seen.add(above)
                yield from _heading(above, meanings)
        seen.add(section)
        yield from _heading(section, meanings) if section else ["## Top level { #top-level }\n"]
        yield "| Setting | Meaning | Type | Default |"
        yield "|---|---|---|---|"
        yield from rows
        yield ""


def _heading(section: str, meanings: Mapping[str, str]) -> Iterator[str]:
    depth = min(section.count(".") + 2, 4)
    yield f"{'#' * depth} {section} {{ #{section} }}\n"
    if meaning := meanings.get(section):
        yield f"{meaning}\n"


# --------------------------------------------------------------------------------------------------------- commands


def commands() -> str:
    """Every command with its options."""
    import click

    from deploy.cli import millrace

    context = click.Context(millrace, info_name="millrace")
    parts = [
        "# Commands\n",
        "Every command also takes each [setting](settings.md) as an option, before or after its name. It ends with 0 "
        "if it succeeded, with 2 on a wrong command line or setting, with 1 on any other failure, and with 128 + n "
        "after signal n. Other codes are listed with the command.\n",
        "## millrace { #millrace }\n",
        *_command(millrace, context),
    ]
    for name in millrace.list_commands(context):
        parts += _commands(millrace.get_command(context, name), context, name, depth=2)
    return "\n".join(parts)


def _commands(command: click.Command | None, parent: click.Context, name: str, depth: int) -> Iterator[str]:
    import click

    assert command is not None, f"{parent.command_path} {name} is listed and not there"
    context = click.Context(command, info_name=name, parent=parent)
    yield f"{'#' * depth} {context.command_path} {{ #{context.command_path.replace(' ', '-')} }}\n"
    yield from _command(command, context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _commands(command.get_command(context, below), context, below, depth + 1)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```\n{context.command_path} {pieces}\n```\n"
    yield from _help(command.help or "")
    records = [option.get_help_record(context) for option in command.get_params(context) if option.name != "help"]
    rows = [record for record in records if record]
    if rows:
        yield "| Option | Meaning |"
        yield "|---|---|"
        yield from (f"| {code(option)} | {cell(meaning)} |" for option, meaning in rows)
        yield ""


def _help(help_text: str) -> Iterator[str]:
    """A command's own words; a paragraph after click's \\b is kept as it stands."""
    for paragraph in re.split(r"\n\s*\n", help_text.strip()):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        if lines and lines[0] == "\b":
            yield "```\n" + "\n".join(lines[1:]) + "\n```\n"
        else:
            yield " ".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------- HTTP


def http() -> str:
    """Every route with its fields and errors, from the server's own OpenAPI document."""
    from feedback.config import FeedbackConfig
    from serve.app import create_app
    from serve.config import ServeConfig

    return "\n".join(_http_page(create_app(ServeConfig(), FeedbackConfig()).openapi()))


def _http_page(document: Schema) -> Iterator[str]:
    yield "# HTTP API\n"
    yield (
        "A running server has the same as an OpenAPI document at `/openapi.json`, and as a page to try it on at "
        "`/docs`. Bounds below are those of the default [limits](settings.md#serve.limits). In a body under "
        "`/v1`, null in a field that is not required says the same as leaving it out.\n"
    )
    yield "| Route | Does |\n|---|---|"
    for method, path, operation in operations(document):
        first = text(operation.get("description", "")).split(". ")[0].rstrip(".")
        yield f"| [`{method} {path}`](#{_anchor(method, path)}) | {cell(first)} |"
    yield "\n## Headers of every request { #headers }\n"
    yield "| Header | Meaning |\n|---|---|"
    for parameter in document["components"].get("parameters", {}).values():
        yield f"| `{parameter['name']}` | {cell(parameter['description'])} |"
    for scheme in document["components"].get("securitySchemes", {}).values():
        name = scheme.get("name") or "Authorization: Bearer"
        yield f"| `{name}` | {cell(scheme['description'])} |"
    yield ""
    for method, path, operation in operations(document):
        yield f"## {method} {path} {{ #{_anchor(method, path)} }}\n"
        yield from _operation(operation, document)
    yield "## Objects { #objects }\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"### {name} {{ #{name.lower()} }}\n"
        yield text(schema.get("description", "")) + "\n"
        yield from _fields(schema, document)


def operations(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    """(method, path, operation) of an OpenAPI document."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _operation(operation: Schema, document: Schema) -> Iterator[str]:
    yield operation.get("description", "").replace("``", "`") + "\n"
    for parameter in operation.get("parameters", ()):
        if "$ref" not in parameter:
            yield f"`{parameter['name']}` in the {parameter['in']}: {text(parameter.get('description', ''))}\n"
    if body := operation.get("requestBody"):
        schema = body["content"]["application/json"]["schema"]
        if "$ref" in schema:
            yield f"Body: {link(schema['$ref'])}\n"
        else:
            yield "Body:\n"
            yield from _fields(schema, document)
    yield "| Status | Body | When |\n|---|---|---|"
    for status, answer in sorted(operation["responses"].items()):
        kinds = [
            type_of(content.get("schema", {}), document) if "$ref" in content.get("schema", {}) else code(kind)
            for kind, content in answer.get("content", {}).items()
        ]
        when = answer.get("description", "").replace("Successful Response", "Success")
        yield f"| {status} | {', '.join(dict.fromkeys(kinds))} | {cell(when)} |"
    yield ""


def _fields(schema: Schema, document: Schema) -> Iterator[str]:
    if not schema.get("properties"):
        return
    required = schema.get("required", ())
    yield "| Field | Meaning | Type | Default |\n|---|---|---|---|"
    for name, field in schema["properties"].items():
        default = "required" if name in required else code(json.dumps(field["default"])) if "default" in field else ""
        if default == "`null`":
            default = ""
        yield f"| `{name}` | {cell(field.get('description', ''))} | {type_of(field, document)} | {default} |"
    yield ""


def _anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method} {path}".lower()).strip("-")


# ----------------------------------------------------------------------------------------------------------- tables


def tables() -> str:
    """The lake's tables, column by column."""
    from feedback.schema import TABLES

    parts = [
        "# Tables\n",
        "The lake holds three Delta tables. Each has a further column `date`, the day (UTC) by which it is "
        "partitioned. [Data](../guide/data.md) shows how to read them.\n",
    ]
    for table, schema in TABLES.items():
        parts += [f"## {table}\n", "| Column | Meaning | Type | Null |", "|---|---|---|---|"]
        for field in schema:
            null = "yes" if field.nullable else "no"
            parts.append(f"| `{field.name}` | {COLUMNS[table][field.name]} | {code(str(field.type))} | {null} |")
        parts.append("")
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------------- text


def cell(words: str) -> str:
    """The same inside a table; what looks like a tag or a placeholder is shown as it stands."""
    parts = re.split(r"(`[^`]*`)", text(words))
    return "".join(part.replace("|", "\\|") if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(words: str) -> str:
    return re.sub(r"([|*_\[\]{}])", r"\\\1", html.escape(words, quote=False))


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/settings.md": settings,
    "reference/commands.md": commands,
    "reference/http.md": http,
    "reference/tables.md": tables,
}
