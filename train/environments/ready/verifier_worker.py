"""Verdicts that a hostile text could make last for ever, or fill memory with. Run by ``verifier``.

Each line of its standard input is a JSON list [seconds, kind, argument, argument], each line of its output the verdict,
or text: what is wrong with that by which it should judge. Whoever started it kills it when it takes longer, or an alarm
does, if nobody is there any more. No text is ever executed: mathematics is read by a grammar.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

_LONGEST: Final = 2000
"""Characters of mathematics that are read."""
_MOST_DIGITS: Final = 400
_NUMBER: Final = re.compile(r"\d+\.?\d*|\.\d+")
_LARGEST_EXPONENT: Final = 1000

_FUNCTIONS: Final = ("sqrt", "sin", "cos", "tan", "ln", "log", "exp", "abs")

_LATEX: Final = (
    (re.compile(r"\\left|\\right|\\,|\\!|\\;|\\:|\\ |\\displaystyle|\$"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}"), " "),
    (re.compile(r"\\cdot|\\times"), "*"),
    (re.compile(r"\\div"), "/"),
    (re.compile(r"\\pi\b|π"), "(pi)"),
    (re.compile(r"\\infty|∞"), "(oo)"),
    (re.compile(r"\^\s*\\circ|\\%|%|\\degree"), ""),
    (re.compile(r"\\(sqrt|sin|cos|tan|ln|log|exp)\b"), r"\1"),
    (re.compile(r"−"), "-"),
)
_FRACTION: Final = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}|\\frac\s*(\d)\s*(\d)")
_ROOT: Final = re.compile(r"sqrt\s*(?:\[([^\[\]]*)\])?\s*\{([^{}]*)\}")
_GROUPED: Final = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACES: Final = re.compile(r"(?<![0-9])\s+|\s+(?![0-9\s])")
"""All but those that part two numbers."""
_CALL: Final = re.compile(rf"\b({'|'.join(_FUNCTIONS)})\s*(?=\()")
_TIMES: Final = re.compile(r"(?<=[\d)])\s*(?=[A-Za-z(])|(?<=\))\s*(?=\d)|(?<=\b[a-z])\s*(?=\()")


def main() -> None:
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import jsonschema  # noqa: F401  now, and not in the seconds of the first verdict
    import sympy  # noqa: F401

    kinds: dict[str, Callable[[Any, Any], bool | str]] = {
        "maths": equal,
        "json_schema": conforms,
        "ready": lambda *_: True,
    }
    for line in sys.stdin:
        seconds, kind, *arguments = json.loads(line)
        signal.alarm(math.ceil(seconds) + 1)
        try:
            verdict = kinds[kind](*arguments)
        except MemoryError:
            os._exit(1)  # what is left of this process is not to be trusted
        except Exception as error:  # noqa: BLE001  of SymPy, or a schema's: it says so
            verdict = f"{kind}: {type(error).__name__}: {error}"
        signal.alarm(0)
        print(json.dumps(verdict), flush=True)


def equal(found: str, expected: str) -> bool:
    """Whether two expressions, plain or LaTeX, are equal by symbols. What can't be read is equal to nothing else."""
    if _plain(found) == _plain(expected):
        return True
    a, b = parts(found), parts(expected)
    if len(a) != len(b):
        return False
    if len(a) > 1 and (a[0], b[0], a[-1], b[-1]) == ("{", "{", "}", "}"):  # a set, in any order
        left = b[1:-1]
        for part in a[1:-1]:
            if (i := next((i for i, other in enumerate(left) if _equal(part, other)), None)) is None:
                return False
            del left[i]
        return True
    return all(map(_equal, a, b))


def parts(text: str) -> list[str]:
    """A tuple, a set or an interval by its parts, each with the brackets that it touches; any other text alone."""
    text = text.strip().rstrip(".").replace("\\{", "{").replace("\\}", "}")
    alone = [_GROUPED.sub(lambda number: number[0].replace(",", ""), text)]
    depth, found, last = 0, list[str](), 1
    if not (len(text) > 1 and text[0] in "([{" and text[-1] in ")]}"):
        return alone
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and i < len(text) - 1:
            return alone
        if depth == 1 and character == ",":
            found.append(text[last:i])
            last = i + 1
    return [text[0], *found, text[last:-1], text[-1]] if found else alone


def _equal(found: str, expected: str) -> bool:
    if _plain(found) == _plain(expected):
        return True
    if found in ("(", "[", "{", ")", "]", "}") or expected in ("(", "[", "{", ")", "]", "}"):
        return False
    import sympy

    try:
        a, b = read(found), read(expected)
        difference = sympy.simplify(a - b)
        return difference == 0 or difference.equals(0) is True
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  SymPy has many kinds; what it can't compare is not equal
        return False


def _plain(text: str) -> str:
    return _SPACES.sub("", text.replace("$", "")).rstrip(".")


def read(text: str) -> Any:
    """A SymPy expression of a text, plain or LaTeX. Raises ValueError or SyntaxError for what is none."""
    if len(text) > _LONGEST or "@" in text:
        raise ValueError(f"{text[:80]!r} is no mathematics that is read")
    text = text.split("=")[-1]
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    before = None
    while before != text:
        before = text
        text = _ROOT.sub(lambda m: f"(({m[2]})**(1/({m[1] or 2})))", text)
        text = _FRACTION.sub(lambda m: f"(({m[1] or m[3]})/({m[2] or m[4]}))", text)
    text = text.replace("{", "(").replace("}", ")").replace("^", "**")
    text = _CALL.sub(r"\1@", text)  # so that no product is read into a call
    text = _TIMES.sub("*", text).replace("@", "").strip()
    return _value(ast.parse(text, mode="eval").body, text)


def _value(node: ast.AST, text: str) -> Any:
    import sympy

    match node:
        case ast.Constant(value=bool()):
            raise ValueError("true and false are no numbers")
        case ast.Constant(value=int() | float()):
            number = ast.get_source_segment(text, node) or ""  # Python's float has no more than 17 digits of it
            if len(number) > _MOST_DIGITS or _NUMBER.fullmatch(number) is None:
                raise ValueError("a number has too many digits, or other characters")
            return sympy.Rational(number)
        case ast.Name(id=name):
            constants = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}
            return constants.get(name) or sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand, text) if isinstance(sign, ast.USub) else _value(operand, text)
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(_value(left, text), operator, _value(right, text))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            function = {"abs": sympy.Abs, "ln": sympy.log}.get(name) or getattr(sympy, name)
            return function(_value(argument, text))
    raise ValueError(f"{type(node).__name__} is no mathematics that is read")


def _combined(left: Any, operator: ast.AST, right: Any) -> Any:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Pow():
            if right.is_number and abs(right) > _LARGEST_EXPONENT:
                raise ValueError("an exponent is too large")
            return left**right
    raise ValueError(f"{type(operator).__name__} is no mathematics that is read")


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is Python's, and no JSON")


def conforms(text: str, schema: Any) -> bool:
    """Whether a text is JSON that a schema allows. Raises what says that the schema is none."""
    import jsonschema
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import EMPTY_REGISTRY

    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    try:
        jsonschema.validate(value, schema, registry=EMPTY_REGISTRY)  # nothing is fetched
    except (jsonschema.SchemaError, Unresolvable, re.error, MemoryError):
        raise
    except Exception:  # noqa: BLE001  not valid; or a value, as a number beyond all floats, that it can't judge
        return False
    return True


if __name__ == "__main__":
    main()
