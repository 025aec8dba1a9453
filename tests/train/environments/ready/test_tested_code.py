"""What code can do so that a test that it fails takes it for right, and what tests can ask of code."""

from __future__ import annotations

import textwrap

import pytest

from train.environments.ready.sandbox import SandboxLimits
from train.environments.ready.unit_tests import passes

PATIENT = SandboxLimits(seconds=60)
ADD = "assert add(1, 2) == 3"
ALWAYS = "__eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True"
NUMBER = (
    "__sub__ = __rsub__ = __abs__ = __round__ = __float__ = lambda self, *other: {0}\n    __lt__ = lambda s, o: True"
)

CHEATS = {
    "repeats its input": (
        "import os, sys\ntext = sys.stdin.readline()\nfor fd in range(16):\n"
        "    try: os.write(fd, text.encode())\n    except OSError: pass\nos._exit(0)",
        ADD,
    ),
    "has Python run something else": (
        "import builtins, sys\nbuiltins.compile = builtins.exec = lambda *a, **k: (lambda: 0).__code__\n"
        "sys.settrace(lambda *a: sys.exit(0))",
        ADD,
    ),
    "ends within a call": ("import os\ndef add(a, b): os._exit(0)", f"try: {ADD}\nexcept BaseException: pass"),
    "raises SystemExit": ("def add(a, b): raise SystemExit(0)", ADD),
    "ends itself with the test": (
        "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGTERM)\n    return 4",
        ADD,
    ),
    "is equal to all": (f"class All:\n    {ALWAYS}\ndef add(a, b): return All()", ADD),
    "is equal to all as a number": (f"class All(int):\n    {ALWAYS}\ndef add(a, b): return All(4)", ADD),
    "is in all": (
        f"class All:\n    {ALWAYS}\n    __hash__ = lambda s: 3\ndef add(a, b): return All()",
        "assert add(1, 2) in {3}",
    ),
    "is near all": (
        f"class Near:\n    {NUMBER.format('0.0')}\ndef add(a, b): return Near()",
        "assert abs(add(1, 2) - 3) < 1e-6",
    ),
    "is near all and stays itself": (
        f"class Near:\n    {NUMBER.format('self')}\ndef add(a, b): return Near()",
        "assert abs(add(1, 2) - 3) < 1e-6",
    ),
    "defines what the test measures by": (
        "def abs(x): return 0\nadd = lambda a, b: 7",
        "assert abs(add(1, 2) - 3) < 1e-6",
    ),
    "changes what the test imports": (
        "import math, operator\nmath.isclose = lambda *a, **k: True\nadd = lambda a, b: 7",
        "import math\nassert math.isclose(add(1, 2), 3)",
    ),
    "is a function of the test": (
        "def add(a, b): return check\ndef check(*a): pass",
        "def check(f): assert f(1, 2) == 3\ncheck(add)",
    ),
    "answers with what is no answer": (
        "import gc, socket, json\nfor s in gc.get_objects():\n"
        "    if type(s).__name__ == 'Code':\n"
        "        s.send('ready')\n        s.stream.write(b'[' * 100000 + b'\\n')\n        s.stream.flush()",
        f"try: {ADD}\nexcept Exception: pass",
    ),
    "answers with the test's own parts": (
        "import gc\nfor s in gc.get_objects():\n"
        "    if type(s).__name__ == 'Code':\n"
        "        s.send('ready')\n"
        "        s.send('raised', ['error', 9, 'X', ['builtin', 'SystemExit']], ['tuple', [0]], ['dict', []])",
        ADD,
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_code_that_is_wrong_does_not_pass(name: str) -> None:
    code, test = CHEATS[name]
    assert not passes(code, test, PATIENT)


CODE = """
import asyncio, collections, math

class Error(Exception):
    def __init__(self, what, number):
        super().__init__(what)
        self.number = number

class Worse(Error): pass

class Vector:
    def __init__(self, *parts): self.parts = list(parts)
    def __eq__(self, other): return isinstance(other, Vector) and self.parts == other.parts
    def __hash__(self): return hash(tuple(self.parts))
    def __add__(self, other): return Vector(*(a + b for a, b in zip(self.parts, other.parts)))
    def __mul__(self, factor): return Vector(*(factor * part for part in self.parts))
    def __rmul__(self, factor): return self * factor
    def __len__(self): return len(self.parts)
    def __iter__(self): return iter(self.parts)
    def __getitem__(self, i): return self.parts[i]
    def __setitem__(self, i, value): self.parts[i] = value
    def __contains__(self, part): return part in self.parts
    def __repr__(self): return f"Vector{tuple(self.parts)}"
    def __lt__(self, other): return self.parts < other.parts
    def __enter__(self): return self
    def __exit__(self, *error): self.parts = []
    @property
    def end(self): return self.parts[-1]
    @classmethod
    def zero(cls): return cls(0)

def fail(how): raise {"value": ValueError("no value"), "own": Worse("own", 7), "exit": SystemExit(0)}[how]
def count(n): yield from range(n)
def sort(values, key=None): values.sort(key=key)
def same(value): return value
async def later(value):
    await asyncio.sleep(0)
    return value
def compose(f, g): return lambda x: f(g(x))
def sum(a, b): return a * b
LIMIT = 5
"""
HONEST = {
    "values": """
        import collections, datetime, decimal, fractions, math
        for value in (None, True, -2**70, 10**5000, 1.5, math.inf, "ä\\udc80\\n", b"\\xff", bytearray(b"a"), [1, [2]],
                      int, (1, (2,)), {1, 2}, frozenset("a"), {"a": [1], 2: (3,)}, 1 + 2j, range(1, 9, 2),
                      fractions.Fraction(1, 3), decimal.Decimal("0.10"), collections.deque([1]),
                      collections.Counter("aab"),
                      datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, 5), ValueError):
            assert same(value) == value and type(same(value)) is type(value), value
        assert math.isnan(same(math.nan)) and LIMIT == 5
    """,
    "objects": """
        v = Vector(1, 2)
        assert v == Vector(1, 2) != Vector(2, 1) and v + v == Vector(2, 4) == v * 2 == 2 * v and not v == [1, 2]
        assert len(v) == 2 and list(v) == [1, 2] and v[1] == v.end == 2 and 1 in v and str(v) == "Vector(1, 2)"
        assert isinstance(v, Vector) and not isinstance(v, Error) and len({v, Vector(1, 2)}) == 1
        v[0] = 5
        v.other = 3
        assert v.parts == [5, 2] and v.other == 3 and min(v, Vector(3)) == Vector(3) and Vector.zero().parts == [0]
        with v as same_one:
            assert same_one is v
        assert v.parts == []
    """,
    "errors": """
        import unittest
        class Tests(unittest.TestCase):
            def test_raises(self):
                with self.assertRaises(ValueError) as found: fail("value")
                self.assertEqual(str(found.exception), "no value")
                with self.assertRaises(Error) as found: fail("own")
                self.assertEqual((str(found.exception), found.exception.number), ("own", 7))
                with self.assertRaises(KeyError): fail("none")
                with self.assertRaises(RuntimeError): fail("exit")
                with self.assertRaises(TypeError): fail()
        unittest.main()
    """,
    "iterators": "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0 and [*zip(count(1), 'a')] == [(0, 'a')]",
    "arguments that change": """
        a = [3, 1, 2]
        sort(a)
        assert a == [1, 2, 3]
        sort(a, key=lambda x: -x)
        assert a == [3, 2, 1]
    """,
    "functions of the test": """
        def twice(x): return 2 * x
        assert compose(twice, len)("abc") == 6 and compose(Vector, twice)(2) == Vector(4)
        def fails(x): raise LookupError("none")
        try: compose(fails, twice)(1)
        except LookupError as error: assert "none" in str(error)
        else: assert False
    """,
    "what is asynchronous": """
        import asyncio
        async def both(): return await asyncio.gather(later(1), later(2))
        assert asyncio.run(later([1])) == [1] and asyncio.run(both()) == [1, 2]
    """,
    "names of Python's own": """
        import solution
        from solution import sum as product
        assert sum([2, 3]) == 5 and product(2, 3) == solution.sum(2, 3) == 6
    """,
    "no test in a module": "if __name__ == '__main__':\n    assert same(1) == 1",
}


@pytest.mark.parametrize("name", HONEST)
def test_code_that_is_right_passes(name: str) -> None:
    assert passes(CODE, textwrap.dedent(HONEST[name]), PATIENT)


def test_a_test_that_can_not_be_run_is_no_fault_of_the_code() -> None:
    test = "class Node: pass\ntry: same(Node())\nexcept BaseException: pass"
    with pytest.raises(ValueError, match="gives the code a Node, which can't be copied to its process"):
        passes(CODE, test, PATIENT)
    assert not passes("def use(f): f([])", "use(iter)", PATIENT), "the code has no way to have a test refused"
