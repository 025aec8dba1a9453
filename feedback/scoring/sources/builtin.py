"""The built-in rules. Each gives a number from 0 (bad) to 1 (good), so that weights mean the same for all.

``exact_match``
    1 if the response is the reference, else 0. White space (as for Python's ``str.strip``) around both is ignored;
    case and what stands within are not. The reference is ``metadata[reference]``, ``'answer'`` if no key is given.
    Missing without a reference.
``numeric_equality``
    1 if the last number of the response equals the last number of the reference, else 0, also if the response has none.
    |a − b| ≤ tolerance · max(1, |b|), where b is the reference. A number is digits with an optional sign, groups of
    three parted by commas, decimals after a point, an exponent; it does not touch a letter, digit or underscore on its
    left, and a hyphen that touches a word on its left is no sign (``7-3`` ends in 3, ``gpt-4`` in 4, ``= -3`` in −3).
    Missing without a reference, or where that holds no number.
``regex``
    1 if the pattern (RE2's syntax) is found anywhere in the response, else 0.
``json_schema``
    1 if the response is a JSON text that meets the schema, else 0. White space around it is ignored, NaN and Infinity
    are no JSON. References are resolved within the schema; nothing is fetched. Patterns are in RE2's syntax, which
    takes time in proportion to the text, whatever the text is. Missing where JSON is nested too deeply, or a number too
    large, to be checked against the schema.
``length_penalty``
    1 for responses of up to ``target_tokens`` tokens, 0 from ``max_tokens`` on, in between falling in a straight line
    (the shape of DAPO's soft punishment of overlong responses, arXiv 2503.14476, eq. 13, one higher).
``repetition_penalty``
    The share of the response's n-grams of tokens that are distinct; 1 where it has fewer than n tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from feedback.config import RuleConfig
from feedback.lake.views import quoted

DEFAULT_REFERENCE: Final = "answer"
DEFAULT_TOLERANCE: Final = 1e-9
DEFAULT_NGRAM: Final = 4

_SPACE: Final = r"[\x09-\x0d\x1c-\x20\x{85}\p{Z}]"  # str.isspace, for RE2
_DIGITS: Final = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_NUMBER: Final = rf"(?:^|[^\w])([-+]?(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"


def sql(config: RuleConfig) -> tuple[str, str]:
    """(expression, why it is NULL where it is), as DuckDB SQL over the columns of ``rules.COLUMNS``."""
    reference_key = config.reference or DEFAULT_REFERENCE
    reference = f"metadata[{quoted(reference_key)}]"
    no_reference = quoted(f"no {reference_key!r} in the response's metadata")
    match config.ready:
        case "exact_match":
            return _exact_match(reference), no_reference
        case "numeric_equality":
            tolerance = DEFAULT_TOLERANCE if config.tolerance is None else config.tolerance
            no_number = quoted(f"{reference_key!r} in the response's metadata holds no number")
            reason = f"CASE WHEN {reference} IS NULL THEN {no_reference} ELSE {no_number} END"
            return _numeric_equality(reference, tolerance), reason
        case "regex":
            return f"regexp_matches(response, {quoted(config.pattern or '')})", "'no response'"
        case "length_penalty":
            target, most = config.target_tokens or 0, config.max_tokens or 1
            share = f"({most} - len(response_token_ids)) / {most - target}::DOUBLE"
            return f"greatest(0.0, least(1.0, {share}))", "'no tokens'"
        case "repetition_penalty":
            return _distinct_ngrams(config.ngram or DEFAULT_NGRAM), "'no tokens'"
    raise ValueError(f"{config.ready!r} is no ready rule in SQL")


class JsonSchema:
    """The rule ``json_schema``, as a function over an Arrow table."""

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises ValueError for a pattern that RE2 can't run."""
        from jsonschema.validators import extend, validator_for
        from referencing.jsonschema import EMPTY_REGISTRY

        self.schema = schema
        for pattern in _patterns(schema):
            try:
                _matches(pattern, "")
            except pa.ArrowInvalid as error:
                raise ValueError(f"the schema's pattern {pattern!r}: {error}") from error
        keywords = {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
        }
        self._validator = extend(validator_for(schema), keywords)(schema, registry=EMPTY_REGISTRY)

    def __call__(self, batch: pa.Table) -> list[float | None]:
        return [self._holds(text) for text in batch["response"].to_pylist()]

    def _holds(self, text: str) -> float | None:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return 0.0
        try:
            return float(self._validator.is_valid(value))
        except (RecursionError, OverflowError):  # nested too deeply, or a number too large, to be checked
            return None


def _matches(pattern: str, text: str) -> bool:
    text = text.encode(errors="replace").decode()  # JSON can say half a character
    return bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())


def _patterns(schema: Any) -> Iterator[str]:
    """All that stands where a pattern does. Raises ValueError for what jsonschema would search with Python's ``re``."""
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            if "unevaluatedProperties" in schema:
                raise ValueError("unevaluatedProperties beside patternProperties can't be used: write the names out")
            yield from schema["patternProperties"]
        for part in schema.values():
            yield from _patterns(part)


# jsonschema's own search with Python's re: on some texts, which a user may bring about, it would take for ever.


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, _: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, schema in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: dict[str, Any]) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in instance:
        if name in known or any(_matches(pattern, name) for pattern in patterns):
            continue
        if validator.is_type(allowed, "object"):
            yield from validator.descend(instance[name], allowed, path=name)
        elif not allowed:
            yield ValidationError(f"{name!r} is not allowed")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _exact_match(reference: str) -> str:
    def has_space_around(text: str) -> str:
        return f"(regexp_matches({text}, '^{_SPACE}') OR regexp_matches({text}, '{_SPACE}$'))"

    def strip(text: str) -> str:
        return f"regexp_replace({text}, '^{_SPACE}+|{_SPACE}+$', '', 'g')"

    # Stripping is slow and rarely needed, so it is left to the rows that need it.
    return (
        f"CASE WHEN {reference} IS NULL THEN NULL WHEN response = {reference} THEN true "
        f"WHEN {has_space_around('response')} OR {has_space_around(reference)} "
        f"THEN {strip('response')} = {strip(reference)} ELSE false END"
    )


def _numeric_equality(reference: str, tolerance: float) -> str:
    def last_number(text: str) -> str:
        found = f"regexp_extract_all(replace({text}, '−', '-'), '{_NUMBER}', 1)[-1]"
        return f"TRY_CAST(replace({found}, ',', '') AS DOUBLE)"

    right = last_number(reference)
    close = f"abs({last_number('response')} - {right}) <= {tolerance!r}::DOUBLE * greatest(1.0, abs({right}))"
    return f"CASE WHEN {right} IS NULL THEN NULL ELSE coalesce({close}, false) END"


def _distinct_ngrams(n: int) -> str:
    token = ", ".join(f"response_token_ids[i + {k}]" for k in range(n))
    grams = f"list_transform(range(1, len(response_token_ids) - {n - 2}), lambda i : hash({token}))"
    count = f"(len(response_token_ids) - {n - 1})"
    return f"CASE WHEN {count} <= 0 THEN 1.0 ELSE list_unique({grams}) / {count}::DOUBLE END"
