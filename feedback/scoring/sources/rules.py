"""Reward components by rule: a Python function, a SQL expression, or one of the built-in rules (``builtin``).

A rule takes a table with the columns ``prompt`` (string), ``messages`` (string, JSON), ``response`` (string),
``response_token_ids`` (list<int32>) and ``metadata`` (map<string, string>), one row a response, and returns one number,
or None, a row. A function may also reward the parts of a response (``PerToken``). Scoring, training and evaluation use
the same rules: scoring puts SQL into its own query, training and evaluation call the rule.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from feedback.config import RuleConfig
from feedback.processes.signals import StopSignal
from feedback.schema import INTERACTIONS, conform
from feedback.scoring.sources import builtin

COLUMNS: Final = ("prompt", "messages", "response", "response_token_ids", "metadata")
"""What a rule sees of a response."""

Values = list[float | None]
Reasons = list[str | None]

_NUMBERS: Final = (
    *("boolean", "float", "double", "decimal", "tinyint", "smallint", "integer", "bigint", "hugeint"),
    *("utinyint", "usmallint", "uinteger", "ubigint", "uhugeint"),
)
"""DuckDB's types that a reward may have."""

_SCHEMA: Final = pa.schema([INTERACTIONS.field(name).with_nullable(True) for name in COLUMNS])
LARGEST: Final = 1e30
"""A reward beyond it, in either direction, is none: weighted means of such numbers would not be finite."""
_REASON_LENGTH: Final = 500
_NO_NUMBER: Final = "the expression gave no number, or failed"


class RuleError(RuntimeError):
    """A rule can't be loaded, failed, or returned what is no reward. The message names the rule."""


class RuleShapeError(RuleError):
    """A rule did not return one value a row: which value is whose can't be known."""


class _NoRewardError(ValueError):
    """What a function returned, and why that is no reward."""

    def __init__(self, what: object, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why


class PerToken(float):
    """A reward that is the sum of rewards per token of the response; ``tokens`` are those."""

    tokens: list[float]

    @classmethod
    def of(cls, value: list[Any], tokens: int) -> PerToken:
        """Of what a function returned for a response of so many tokens.

        That is a number for each token, or [index of its last token, number] for each step, in order.

        Raises:
            ValueError: it is neither.
        """
        if not any(isinstance(part, list | tuple) for part in value):
            if len(value) != tokens:
                raise _NoRewardError(f"{len(value)} numbers", f"the response has {tokens} tokens")
            rewards = [_finite(part) for part in value]
        else:
            rewards, before = [0.0] * tokens, -1
            for part in value:
                if not isinstance(part, list | tuple) or len(part) != 2:
                    raise _NoRewardError(f"step {part!r}", "a step is [index of its last token, number]")
                end, number = part
                if not isinstance(end, numbers.Integral) or not before < int(end) < tokens:
                    why = f"ends of steps rise, and are tokens of the response, which has {tokens}, counted from 0"
                    raise _NoRewardError(f"a step that ends at {end!r}", why)
                rewards[int(end)], before = _finite(number), int(end)
        made = cls(_finite(sum(rewards)))
        made.tokens = rewards
        return made


def _finite(value: Any) -> float:
    """The number, if it is one that a reward may be. Raises _NoRewardError else."""
    # numpy's bool is no Number, its other scalars are.
    if not isinstance(value, numbers.Real) and type(value).__name__ != "bool":
        raise _NoRewardError(repr(value), "a reward is a number or None, or a list of numbers per token or of steps")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise _NoRewardError(number, f"a reward lies within ±{LARGEST:g}")
    return number


@dataclass(frozen=True)
class FunctionRule:
    """A Python function; ``digest`` is that of its name and source file, or of what configures it."""

    name: str
    function: Callable[[pa.Table], Sequence[float | None]]
    digest: str

    def __call__(self, batch: pa.Table) -> Values:
        """One reward, or None, a row. Raises RuleError if the rule fails or gives what is no reward."""
        try:
            return self._checked(self.function(batch), batch)
        except (RuleError, StopSignal):
            raise
        except (Exception, SystemExit) as error:  # the values may be a generator, or numbers of its own kind
            raise RuleError(f"rule {self.name} failed: {type(error).__name__}: {error}") from error

    def by_row(self, batch: pa.Table) -> tuple[Values, Reasons]:
        """(rewards, why a row has none): if the batch fails, each row by itself.

        What is not one value a row is no reward for any of them.
        """
        try:
            values = self(batch)
        except RuleError as error:
            if batch.num_rows <= 1 or isinstance(error, RuleShapeError):
                return [None] * batch.num_rows, [str(error)[:_REASON_LENGTH]] * batch.num_rows
            single = [self.by_row(batch.slice(row, 1)) for row in range(batch.num_rows)]
            return [values[0] for values, _ in single], [reasons[0] for _, reasons in single]
        return values, ["the rule gave none" if value is None else None for value in values]

    def _checked(self, values: Any, batch: pa.Table) -> Values:
        try:
            listed = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)
        except TypeError as error:
            kind = type(values).__name__
            raise RuleShapeError(f"rule {self.name} returned {kind}, not a sequence with one number a row") from error
        if len(listed) != batch.num_rows:
            raise RuleShapeError(f"rule {self.name} returned {len(listed)} values for {batch.num_rows} rows")
        return [None if value is None else self._reward(value, batch, row) for row, value in enumerate(listed)]

    def _reward(self, value: Any, batch: pa.Table, row: int) -> float:
        if getattr(value, "ndim", 0):  # an array or a tensor of a response's tokens
            value = value.tolist()
        try:
            if isinstance(value, list | tuple):
                return PerToken.of(list(value), len(batch["response_token_ids"][row].as_py()))
            return _finite(value)
        except _NoRewardError as error:
            raise RuleError(f"rule {self.name} returned {error.what} for row {row}; {error.why}") from error


@dataclass(frozen=True)
class SqlRule:
    """A DuckDB expression over COLUMNS. ``reason`` is SQL for why a row has no value."""

    name: str
    expression: str
    reason: str
    digest: str

    @property
    def value(self) -> str:
        """SQL for the reward: a DOUBLE within ±LARGEST, or NULL; it never fails."""
        number = f"TRY(({self.expression}\n)::DOUBLE)"
        return f"CASE WHEN abs({number}) <= {LARGEST:e} THEN {number} END"

    def __call__(self, batch: pa.Table) -> Values:
        return self.by_row(batch)[0]

    def by_row(self, batch: pa.Table) -> tuple[Values, Reasons]:
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.register("responses", conform(batch, _SCHEMA))
            columns = connection.sql(
                f"SELECT value, CASE WHEN value IS NULL THEN {self.reason} END FROM "
                f"(SELECT *, {self.value} AS value FROM responses)"
            ).to_arrow_table()
        values, reasons = (column.to_pylist() for column in columns.columns)
        return values, reasons


Rule = FunctionRule | SqlRule
"""A loaded rule. Called with a table it gives one reward, or None, a row, or raises RuleError; by ``by_row`` only the
rows that it fails on go without. ``digest`` is a SHA-256 of all that decides its values."""


def load_rules(rules: Mapping[str, RuleConfig]) -> list[tuple[Rule, float]]:
    """(rule, weight) for every rule that has a weight, called by its component's name. Raises RuleError."""
    return [(configured(name, rule), rule.weight) for name, rule in sorted(rules.items()) if rule.weight > 0]


def configured(name: str, config: RuleConfig) -> Rule:
    """The rule that the settings describe under a name. Raises RuleError if it can't be loaded."""
    if config.function is not None:
        loaded = load_rule(config.function)
        return FunctionRule(name, loaded.function, loaded.digest)
    if config.sql is not None:
        return _checked_sql(name, config.sql, f"'{_NO_NUMBER}'")
    if config.ready == "json_schema":
        content = json.dumps(config.json_schema, sort_keys=True)
        try:
            return FunctionRule(name, builtin.JsonSchema(config.json_schema or {}), _sha256(f"json_schema {content}"))
        except ValueError as error:
            raise RuleError(f"rule {name}: {error}") from error
    return _checked_sql(name, *builtin.sql(config))


def load_rule(name: str) -> FunctionRule:
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
    except (Exception, SystemExit) as error:  # it is a program, which may raise anything
        raise RuleError(f"rule {name}: module {module_name!r} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise RuleError(f"rule {name}: module {module_name!r} ({module.__file__}) has no function {attribute!r}")
    return FunctionRule(name, function, _source_digest(function, name))


def _checked_sql(name: str, expression: str, reason: str) -> SqlRule:
    """Raises RuleError for what DuckDB can't make a number of, row by row, from a response's columns."""
    rule = SqlRule(name, expression, reason, _sha256(f"{expression}\n{reason}"))
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("responses", _SCHEMA.empty_table())
        try:
            if len(connection.extract_statements(f"SELECT ({expression}\n)")) != 1:
                raise RuleError(f"rule {name}: {expression!r} is not one SQL expression")
            kind = connection.sql(f"SELECT ({expression}\n) AS value FROM responses").types[0].id
            # A condition holds no aggregate and no window: a response's reward depends on nothing but the response.
            connection.execute(f"SELECT 1 FROM responses WHERE {rule.value} IS NULL AND {reason} IS NULL")
        except duckdb.Error as error:
            raise RuleError(f"rule {name}: DuckDB can't use {expression!r}: {str(error).strip()}") from error
    if kind not in _NUMBERS:
        raise RuleError(f"rule {name}: {expression!r} is of type {kind}; a reward is a number or a boolean")
    return rule


def _source_digest(function: Callable[..., Any], name: str) -> str:
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        source = None
    if source is None:
        raise RuleError(f"rule {name} has no source file, so its version can't be recorded")
    # With the function's name: one file may define several.
    return hashlib.sha256(Path(source).read_bytes() + b"\0" + name.partition(":")[2].encode()).hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
