"""Runs a test of code that nobody trusts, in ``unit_tests``' sandbox: the test in one process, the code in another.

The code's process has neither the test nor a way to the verdict, which is the exit code of the test's. They speak over
a socket, in JSON. Values of Python's own types are copied (``_TYPES``); functions of a test can be called from the
code; whatever else the code makes stays there, and the test has a ``Remote`` of it. A ``Remote`` is equal to no value,
less than none, and takes part in no sum that comes to one, so that no operator of the code's decides what a test finds.

Its standard input is the test; the code is in ``solution.py``. A test that asks for what can't be had here ends with
``UNSUPPORTED``, and says on its standard error what that is.
"""

import ast
import builtins
import datetime
import json
import operator
import os
import socket
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

UNSUPPORTED = 112

_SIMPLE = (type(None), bool, str, float)
_TYPES: dict[str, tuple[type, Any, Any]] = {
    **{of.__name__: (of, list, of) for of in (list, tuple, set, frozenset, deque)},
    **{of.__name__: (of, lambda value: list(map(list, value.items())), of) for of in (dict, OrderedDict)},
    "Counter": (Counter, lambda value: list(map(list, value.items())), lambda pairs: Counter(dict(pairs))),
    "defaultdict": (defaultdict, lambda value: list(map(list, value.items())), dict),
    "int": (int, hex, lambda text: int(text, 16)),
    "complex": (complex, repr, complex),
    "Fraction": (Fraction, str, Fraction),
    "Decimal": (Decimal, str, Decimal),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda ends: range(*ends)),
    **{of.__name__: (of, of.hex, of.fromhex) for of in (bytes, bytearray)},
    **{of.__name__: (of, of.isoformat, of.fromisoformat) for of in (datetime.date, datetime.datetime, datetime.time)},
}
"""By name: a type, what a value of it is made of, and the way back."""
_NAMES = {of: name for name, (of, _, _) in _TYPES.items()}
_CHANGEABLE = (list, dict, OrderedDict, Counter, set, deque, bytearray)


def main() -> None:
    test_end, code_end = socket.socketpair()
    if os.fork() == 0:  # before the test is read
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        test_end.close()
        Code(code_end).run()
        os._exit(0)
    code_end.close()
    Test(test_end).run(sys.stdin.read())


class _End:
    """One of the two processes, as it speaks to the other."""

    def __init__(self, connection: socket.socket) -> None:
        self.stream = connection.makefile("rwb")
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}

    def keep(self, value: Any) -> int:
        """A number by which the other process can name an object of this one."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def send(self, *message: Any) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def receive(self) -> Any:
        if not (line := self.stream.readline()):
            os._exit(1)  # the other has ended
        return json.loads(line)

    def encoded(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SIMPLE or (kind is int and value.bit_length() < 64):
            return value
        if kind in _NAMES:
            parts = _TYPES[_NAMES[kind]][1](value)
            return [_NAMES[kind], [self.encoded(part) for part in parts] if isinstance(parts, list) else parts]
        if isinstance(value, type) and vars(builtins).get(name := value.__name__) is value:
            return ["builtin", name]
        return self.encoded_object(value)

    def encoded_object(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def decoded_object(self, kind: str, number: int) -> Any:
        raise NotImplementedError

    def decoded(self, found: Any) -> Any:
        if not isinstance(found, list):
            return found
        kind, parts, *more = found
        if kind in _TYPES:
            return _TYPES[kind][2]([self.decoded(part) for part in parts] if isinstance(parts, list) else parts)
        if kind == "builtin" and isinstance(value := getattr(builtins, parts, None), type):
            return value
        return self.decoded_object(kind, parts, *more)


class Code(_End):
    """The process of the code: does what the test's asks for."""

    def run(self) -> None:
        module = types.ModuleType("solution")
        with open("solution.py") as file:
            source = file.read()
        sys.modules["solution"] = module
        try:
            exec(compile(source, "solution.py", "exec"), module.__dict__)
        except BaseException:  # noqa: BLE001  as SystemExit; no test can be run
            os._exit(1)
        self.keep(module)
        self.send("ready")
        while True:
            self.answer(*self.receive())

    def answer(self, operation: str, arguments: list[Any], named: dict[str, Any]) -> None:
        given = [self.decoded(argument) for argument in arguments]
        before = [self.encoded(value) if type(value) in _CHANGEABLE else None for value in given]
        try:
            found = _do(operation)(*given, **{name: self.decoded(value) for name, value in named.items()})
            changed = [
                [i, after]
                for i, (value, old) in enumerate(zip(given, before, strict=True))
                if old is not None and (after := self.encoded(value)) != old
            ]
            reply = ["returned", self.encoded(found), changed]
        except BaseException as error:  # noqa: BLE001  whatever nobody trusts raises
            kind = type(error) if isinstance(error, Exception) else RuntimeError
            reply = ["raised", self.encoded(kind), self.encoded(error.args), self.encoded(vars(error))]
        self.send(*reply)

    def encoded_object(self, value: Any) -> list[Any]:
        if isinstance(value, type) and issubclass(value, Exception):
            return ["error", self.keep(value), value.__name__, self.encoded(value.__base__)]
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", self.keep(value)]

    def decoded_object(self, kind: str, number: int) -> Any:
        if kind == "object":
            return self.kept[number]

        def function_of_the_test(*arguments: Any, **named: Any) -> Any:
            encoded = [self.encoded(argument) for argument in arguments]
            self.send("call", number, encoded, {name: self.encoded(value) for name, value in named.items()})
            while (message := self.receive())[0] not in ("returned", "raised"):  # what it asks for meanwhile
                self.answer(*message)
            if message[0] == "raised":
                raise getattr(builtins, message[1], RuntimeError)(message[2])
            return self.decoded(message[1])

        return function_of_the_test


def _do(operation: str) -> Any:
    if operation == "run":
        import asyncio  # only few need it, and it takes long

        return asyncio.run
    return getattr(operator, operation, None) or getattr(builtins, operation)


class Test(_End):
    """The process of the test. Nothing that it receives is executed."""

    def run(self, text: str) -> None:
        program = compile(text, "tests.py", "exec")
        self.receive()  # that the code has been run
        self.known: dict[int, Any] = {}
        solution = self.decoded_object("object", 0)
        sys.modules["solution"] = solution
        module = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest looks for tests
        names = vars(module)
        names["solution"] = solution
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id) and node.id not in names:
                try:
                    names[node.id] = self.ask("getattr", solution, node.id)
                except AttributeError:  # the test's own
                    continue
        exec(program, names)

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """What an operation comes to there; what it raises is raised here."""
        try:
            encoded = [self.encoded(a) for a in arguments], {name: self.encoded(v) for name, v in named.items()}
        except (_Unsupported, RecursionError) as unsupported:
            sys.stderr.write(f"a test gives the code {unsupported}\n")
            sys.stderr.flush()
            os._exit(UNSUPPORTED)
        self.send(operation, *encoded)
        while True:
            try:
                kind, *message = self.receive()
                if kind == "call":
                    number, *parts = message
                    function, given = self.kept[number], [self.decoded(part) for part in parts[0]]
                    by_name = {str(name): self.decoded(value) for name, value in parts[1].items()}
                elif kind == "returned":
                    found = self.decoded(message[0])
                    for i, value in message[1]:
                        _change(arguments[i], self.decoded(value))
                else:
                    error = self.decoded(message[0])(*self.decoded(message[1]))
                    error.__dict__.update(self.decoded(message[2]))
                    if not isinstance(error, Exception):
                        os._exit(1)
            except BaseException:  # noqa: BLE001  no test may take this for what the code raised
                os._exit(1)
            if kind == "returned":
                return found
            if kind == "raised":
                raise error
            try:
                self.send("returned", self.encoded(function(*given, **by_name)))
            except _Unsupported:  # the code has chosen what it called the function with
                os._exit(1)
            except Exception as error:  # noqa: BLE001  raised where the code called
                self.send("raised", type(error).__name__, str(error))

    def encoded_object(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["object", value.__number__]
        if callable(value):
            return ["function", self.keep(value)]
        raise _Unsupported(f"a {type(value).__name__}, which can't be copied to its process")

    def decoded_object(self, kind: str, number: int, name: str = "", base: Any = None) -> Any:
        if kind == "coroutine":
            return self.run_there(number)
        if number not in self.known:
            self.known[number] = type(name, (self.decoded(base),), {}) if kind == "error" else Remote(self, number)
        return self.known[number]

    async def run_there(self, number: int) -> Any:
        return self.ask("run", Remote(self, number))


def _change(value: Any, to: Any) -> None:
    """What the code did to an argument."""
    if type(value) not in _CHANGEABLE or type(to) is not type(value):
        os._exit(1)
    if isinstance(value, list | bytearray):
        value[:] = to
    else:
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(to)


class _Unsupported(BaseException):
    """A test asks for what can't be had; no test may catch it."""


class Remote:
    """An object of the code's process."""

    def __init__(self, end: Test, number: int) -> None:
        vars(self).update(__end__=end, __number__=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self.__end__.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__end__.ask("setattr", self, name, value)

    def __instancecheck__(self, value: Any) -> Any:
        return self.__end__.ask("isinstance", value, self)

    def __enter__(self) -> Any:
        return self.__end__.ask("getattr", self, "__enter__")()

    def __exit__(self, *error: Any) -> None:
        self.__end__.ask("getattr", self, "__exit__")(None, None, None)


def _forward() -> None:
    """Give ``Remote`` the operators that the code's objects may have."""

    def unary(operation: str) -> Any:
        return lambda self, *more, **named: self.__end__.ask(operation, self, *more, **named)

    def compared(operation: str) -> Any:
        return lambda self, other: (
            self.__end__.ask(operation, self, other) if isinstance(other, Remote) else NotImplemented
        )

    def sum_of(left: Any, right: Any, operation: str, end: Test) -> Any:
        found = end.ask(operation, left, right)
        if not isinstance(found, Remote) and not (isinstance(left, Remote) and isinstance(right, Remote)):
            raise TypeError(f"{operation} of an object of the code and a value comes to a value")
        return found

    def binary(operation: str) -> Any:
        return lambda self, other: sum_of(self, other, operation, self.__end__)

    def reflected(operation: str) -> Any:
        return lambda self, other: sum_of(other, self, operation, self.__end__)

    for name in ("iter", "next", "len", "hash", "str", "repr", "bool", "reversed", "neg", "pos", "invert", "call"):
        setattr(Remote, f"__{name}__", unary(name))
    for name in ("getitem", "setitem", "delitem", "contains"):
        setattr(Remote, f"__{name}__", unary(name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Remote, f"__{name}__", compared(name))
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        setattr(Remote, f"__{name}__", binary(name))
        setattr(Remote, f"__r{name}__", reflected(name))
    for name in ("and", "or", "xor", "lshift", "rshift"):
        own = f"{name}_" if name in ("and", "or") else name
        setattr(Remote, f"__{name}__", binary(own))
        setattr(Remote, f"__r{name}__", reflected(own))


if __name__ == "__main__":
    _forward()
    main()
