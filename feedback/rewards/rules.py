"""The reward component ``rules``: a Python function over Arrow tables, named in config as ``module:name``.

A rule takes a table with the columns ``prompt`` (string), ``response`` (string), ``response_token_ids`` (list<int32>)
and ``metadata`` (map<string, string>), one row a response, and returns one number, or None, a row. Scoring, training
and evaluation call the same rule. Whatever else a table has, such as ``messages``, a rule may use if it is there.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

NAME: Final = "rules"
_REASON_LENGTH: Final = 500


class RuleError(RuntimeError):
    """A rule can't be loaded, failed, or returned what is no reward. The message names the function."""


@dataclass(frozen=True)
class Rule:
    """A loaded reward function. ``digest`` is the SHA-256 of the source file that defines it."""

    name: str
    function: Callable[[pa.Table], Sequence[float | None]]
    digest: str

    def __call__(self, batch: pa.Table) -> list[float | None]:
        """One reward, or None, a row. Raises RuleError if the function raises or returns anything else."""
        try:
            values = self.function(batch)
        except Exception as error:
            raise RuleError(f"rule {self.name} failed: {type(error).__name__}: {error}") from error
        return self._checked(values, batch.num_rows)

    def by_row(self, batch: pa.Table) -> tuple[list[float | None], list[str | None]]:
        """(rewards, why a row has none): if the batch fails, each row by itself, so that only the bad ones miss."""
        try:
            values = self(batch)
        except RuleError as error:
            if batch.num_rows <= 1:
                return [None] * batch.num_rows, [str(error)[:_REASON_LENGTH]] * batch.num_rows
            single = [self.by_row(batch.slice(row, 1)) for row in range(batch.num_rows)]
            return [values[0] for values, _ in single], [reasons[0] for _, reasons in single]
        return values, ["the rule gave none" if value is None else None for value in values]

    def _checked(self, values: Any, rows: int) -> list[float | None]:
        try:
            listed = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)
        except TypeError as error:
            kind = type(values).__name__
            raise RuleError(f"rule {self.name} returned {kind}, not a sequence with one number a row") from error
        if len(listed) != rows:
            raise RuleError(f"rule {self.name} returned {len(listed)} values for {rows} rows")
        return [None if value is None else self._number(value, row) for row, value in enumerate(listed)]

    def _number(self, value: Any, row: int) -> float:
        # numpy's bool is no Number, its other scalars are.
        if not isinstance(value, numbers.Real) and type(value).__name__ != "bool":
            raise RuleError(f"rule {self.name} returned {value!r} for row {row}; a reward is a number or None")
        number = float(value)
        if not math.isfinite(number):
            raise RuleError(f"rule {self.name} returned {number} for row {row}; a reward is finite")
        return number


def load_rule(name: str) -> Rule:
    """The function that ``module:name`` names. Raises RuleError if there is none."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise RuleError(f"rule {name!r} does not name a function; write 'module:name'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RuleError(
            f"rule {name}: module {module_name!r} can't be imported ({error}); is its folder on PYTHONPATH?"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RuleError(f"rule {name}: module {module_name!r} ({module.__file__}) has no function {attribute!r}")
    return Rule(name, function, _digest(function, name))


def _digest(function: Callable[..., Any], name: str) -> str:
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError as error:
        raise RuleError(f"rule {name} has no source file, so its version can't be recorded: {error}") from error
    if source is None:
        raise RuleError(f"rule {name} has no source file, so its version can't be recorded")
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()
