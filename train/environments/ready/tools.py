"""Python functions that the policy calls, until it answers with a turn without calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from train.environments.environment import Message, Step, Tool, ToolCall
from train.environments.ready.single_turn import FromPrompt
from train.import_object import import_object

_LONGEST: Final = 4000
"""Characters of what a tool returned that the policy reads."""


@dataclass(frozen=True)
class Function:
    """A Python function, its schema by OpenAI's API, and what checks its arguments."""

    call: Callable[..., Any]
    arguments: type[BaseModel]
    schema: Tool

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Function:
        """By its signature, type hints and docstring. Raises ValueError if a parameter can't be named in JSON."""
        hints, fields = get_type_hints(call), dict[str, Any]()
        for name, parameter in inspect.signature(call).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ValueError(f"tool {call.__name__}: parameter {parameter} can't be given by its name")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
        arguments = create_model(call.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = arguments.model_json_schema()
        function = {"name": call.__name__, "description": inspect.getdoc(call) or "", "parameters": parameters}
        return cls(call, arguments, {"type": "function", "function": function})

    async def __call__(self, arguments: Any) -> str:
        """What it returns, as text; what was wrong with the arguments, or what it raised, is for the policy to read."""
        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            return f"error: {problems}"
        try:
            found = self.call(**{name: getattr(checked, name) for name in type(checked).model_fields})
            found = await found if inspect.isawaitable(found) else found
            return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        except Exception as error:  # noqa: BLE001  whatever a user's code raises
            return f"error: {type(error).__name__}: {error}"


class ToolEnvironment(FromPrompt):
    """Tools, and a function that rewards the answer which ends the episode."""

    def __init__(self, tools: Sequence[str], verifier: str, system: str | None = None) -> None:
        """Import the functions, each named as ``module:function``.

        Args:
            tools: what the policy may call; they may be asynchronous. Each runs in the training process.
            verifier: of an ``EpisodePrompt`` and the answer's text, the reward; it may be asynchronous.
            system: a system message before the prompt's own.

        Raises:
            ValueError: one can't be imported, or is no tool.
        """
        super().__init__(system)
        name = "train.environment.arguments"
        functions = [Function.of(import_object(f"{name}.tools", tool, "function")) for tool in tools]
        self.functions = {function.schema["function"]["name"]: function for function in functions}
        if len(self.functions) < len(functions):
            raise ValueError(f"{name}.tools={list(tools)}: the policy calls them by name, and two have the same")
        self.tools = [function.schema for function in functions]
        self.verifier = import_object(f"{name}.verifier", verifier, "function")

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        if not tool_calls:
            reward = self.verifier(self.prompt, text)
            return [], await reward if inspect.isawaitable(reward) else reward, True
        return [await self._message(call) for call in tool_calls], None, False

    async def _message(self, call: ToolCall) -> Message:
        if (function := self.functions.get(call.name)) is None:
            found = f"error: there is no tool {call.name!r}; there are {', '.join(self.functions)}"
        else:
            found = await function(call.arguments)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": found[:_LONGEST]}
