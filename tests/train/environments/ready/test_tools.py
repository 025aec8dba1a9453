"""Python functions as tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from train.environments.environment import EpisodePrompt, ToolCall
from train.environments.ready.tools import Function, ToolEnvironment


def search(query: str, most: int = 3) -> list[str]:
    """Search for a query.

    Returns what was found.
    """
    return [query] * most


def endless(*queries: str) -> None:
    """A tool that can't be called by names."""


def called(name: str, arguments: Any) -> str:
    environment = ToolEnvironment(["players:look", "players:failing", "test_tools:search"], "players:half")

    async def play() -> str:
        await environment.reset(EpisodePrompt("?", None))
        [message], reward, done = await environment.step("", [ToolCall("call_0_0", name, arguments)])
        assert (reward, done, message["role"], message["tool_call_id"]) == (None, False, "tool", "call_0_0")
        return str(message["content"])

    return asyncio.run(play())


def test_a_functions_schema_follows_from_its_signature() -> None:
    schema = Function.of(search).schema
    assert schema["type"] == "function"
    function = schema["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search for a query.\n\nReturns what was found."
    parameters = function["parameters"]
    assert {name: of["type"] for name, of in parameters["properties"].items()} == {"query": "string", "most": "integer"}
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["most"]["default"] == 3


def test_what_a_tool_returned_raised_or_could_not_take_is_for_the_policy_to_read() -> None:
    assert called("look", {"key": "a"}) == "ab"
    assert called("search", {"query": "ä", "most": 2}) == '["ä", "ä"]'
    assert called("failing", {"key": "a"}) == "error: LookupError: nothing for a"
    assert called("look", {}) == "error: key: Field required"
    assert called("look", {"key": "a", "other": 1}) == "error: other: Extra inputs are not permitted"
    assert called("look", "no JSON").startswith("error: arguments: Input should be a valid dictionary")
    assert called("none", {}) == "error: there is no tool 'none'; there are look, failing, search"
    assert len(called("look", {"key": "a", "times": 10**6})) == 4000


def unwritable() -> dict[tuple[int, int], int]:
    """A tool whose result is no JSON."""
    return {(1, 2): 3}


def test_a_result_that_is_no_json_is_for_the_policy_to_read() -> None:
    environment = ToolEnvironment(["test_tools:unwritable"], "players:half")
    [message], _, _ = asyncio.run(environment.step("", [ToolCall("1", "unwritable", {})]))
    assert message["content"].startswith("error: TypeError: keys must be str")


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="the policy calls them by name, and two have the same"):
        ToolEnvironment(["players:look", "test_tools:look"], "players:half")


def look(key: str) -> str:
    """Not that of the players."""
    return key


def test_a_turn_without_calls_is_the_answer() -> None:
    environment = ToolEnvironment(["players:look"], "players:half", system="Look it up.")

    async def play() -> Any:
        messages = await environment.reset(EpisodePrompt("?", None))
        return messages, await environment.step("an answer", [])

    messages, step = asyncio.run(play())
    assert [message["role"] for message in messages] == ["system", "user"]
    assert step == ([], 0.5, True)


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("players:none", "has no 'none'"),
        ("no_such_module:f", "can't be imported"),
        ("test_tools:endless", "parameter \\*queries: 'str' can't be given by its name"),
    ],
)
def test_a_tool_that_is_none_is_refused(tool: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ToolEnvironment([tool], "players:half")
