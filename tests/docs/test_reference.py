"""The reference has all that the code has, and the built pages need nothing from another host."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import click
import pytest
import yaml
from fastapi.routing import APIRoute

from deploy.cli import millrace
from deploy.config import describe, root
from deploy.config.root import Settings
from feedback.config import FeedbackConfig
from feedback.schema import TABLES
from serve.app import create_app
from serve.config import ServeConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_has_a_meaning_a_type_and_a_row_in_the_reference(generate: ModuleType) -> None:
    page = generate.settings()
    for setting in describe.settings_of(Settings):
        assert setting.description, f"{setting.key} has no description"
        (row,) = [line for line in page.splitlines() if f"{{ #{setting.key} }} |" in line]
        _, name, meaning, kind, default, _ = re.split(r"(?<!\\)\|", row)
        assert all(part.strip() for part in (name, meaning, kind, default)), row


def test_every_route_and_each_of_its_fields_is_in_the_reference(generate: ModuleType) -> None:
    app = create_app(ServeConfig(), FeedbackConfig())
    page, document = generate.http(), app.openapi()
    described = {(method, path) for method, path, _ in generate.operations(document)}
    for route in (route for route in app.routes if isinstance(route, APIRoute)):
        for method in route.methods:
            assert (method, route.path) in described, f"{method} {route.path} is not in the OpenAPI document"
            assert f"## {method} {route.path} {{" in page
    for name, schema in document["components"]["schemas"].items():
        section = page.split(f"### {name} {{")[1].split("\n### ")[0]
        for field in schema.get("properties", {}):
            assert f"| `{field}` |" in section, f"{name}.{field} is not in the reference"


def test_every_command_and_each_of_its_options_is_in_the_reference(generate: ModuleType) -> None:
    page = generate.commands()
    for path, command, context in commands(millrace, click.Context(millrace, info_name="millrace")):
        assert command.help, f"{path} has no help"
        section = page.split(f"# {path} {{")[1].split("\n## ")[0]
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.opts[0]} has no help"
                assert parameter.opts[0] in section, f"{path} {parameter.opts[0]} is not in the reference"
        assert context.command_path == path


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, click.Context(below, info_name=name, parent=context))


def test_every_column_of_every_table_has_a_meaning_and_no_other_has_one(generate: ModuleType) -> None:
    assert {table: list(columns) for table, columns in generate.COLUMNS.items()} == {
        table: schema.names for table, schema in TABLES.items()
    }


def test_text_that_looks_like_markup_is_shown_as_it_stands_in_a_table(generate: ModuleType) -> None:
    assert generate.cell("a <b> | c, and `d | e`") == r"a &lt;b&gt; \| c, and `d \| e`"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "train/README.md"])
def test_the_links_of_a_page_outside_the_documentation_lead_to_a_file_and_a_heading(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name
        assert file.exists(), f"{page} links to {target}"
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^a-z0-9]+", "-", heading.lower()) for heading in headings}, target


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """(page, text) of each block of code of these languages in the pages for users."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if language in languages:
                yield page.name, block


def test_every_example_of_settings_can_be_loaded(tmp_path: Path) -> None:
    examples = list(blocks("yaml"))
    assert len(examples) >= 10
    for page, block in examples:
        file = tmp_path / "millrace.yaml"
        of_chart = block.startswith("# values.yaml\n")
        file.write_text(yaml.safe_dump(yaml.safe_load(block)["settings"]) if of_chart else block)
        try:
            root.load(file, environment={})
        except root.ConfigError as error:
            pytest.fail(f"{page}: {error}\n{block}")


def test_every_command_that_a_page_shows_is_there_with_its_options() -> None:
    lines = [
        (page, line)
        for page, block in blocks("", "sh")
        for line in re.findall(r"^millrace (?:\"[^\"]*\"|[^\n\"#<|])*", block.replace("\\\n", " "), re.MULTILINE)
    ]
    assert len(lines) > 20
    for page, line in lines:
        command: click.Command = millrace
        words = shlex.split(line)[1:]
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {
            name for option in [*millrace.params, *command.params] for name in (*option.opts, *option.secondary_opts)
        }
        own = words[: words.index("--")] if "--" in words else words  # what stands behind is another program's
        for word in own:
            if word.startswith("--") and word not in known:
                assert describe.annotation_of(word.removeprefix("--"), Settings) is not None, f"{page}: {line}"
        assert command is not millrace or "--print-config" in words, f"{page}: {line}"


def test_the_documentation_builds_without_a_broken_link_and_fetches_nothing_from_another_host(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert pages
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert not [address for address in loads.addresses if "//" in address], page


class Loads(HTMLParser):
    """What a browser fetches by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "src" or (tag == "link" and name == "href" and dict(attrs).get("rel") != "canonical"):
                self.addresses.append(value or "")
