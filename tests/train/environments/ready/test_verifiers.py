"""What the ready environments say of answers: right, wrong and hostile ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from train.config.environment import EnvironmentConfig
from train.environments import check, identity, maker
from train.environments.calls import Caller, holds_its_thread
from train.environments.environment import EpisodePrompt
from train.environments.ready import verifier
from train.environments.ready.json_schema import JsonSchema
from train.environments.ready.maths import Maths, last_answer
from train.environments.ready.unit_tests import UnitTests, code_of
from train.environments.ready.verifier_worker import equal
from train.environments.time_limit import EPISODE, Handed


def verdict(environment: Any, text: str, **metadata: str) -> float:
    async def play() -> float:
        await environment.reset(EpisodePrompt("?", None, metadata))
        observation, reward, done = await environment.step(text, [])
        assert (observation, done) == ([], True)
        return float(reward)

    return asyncio.run(play())


EQUAL = [
    ("1/2", "0.5"),
    ("\\frac{2}{4}", "1/2"),
    ("-\\frac12", "-0.5"),
    ("\\dfrac{1}{\\sqrt{2}}", "\\frac{\\sqrt2}{2}".replace("sqrt2", "sqrt{2}")),
    ("x^2+2x+1", "(x+1)^2"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\sqrt[3]{27}", "3"),
    ("sin(x)^2+cos(x)^2", "1"),
    ("(1,2)", "(1, \\frac{4}{2})"),
    ("1,000", "1000"),
    ("\\pi/2", "pi/2"),
    ("x=5", "5"),
    ("50\\%", "50"),
    ("$12$", "12"),
    ("\\text{Monday}", "\\text{Monday}"),
    ("5\\text{ cm}", "5"),
    ("\\{2, 1/2\\}", "\\{0.5,2\\}"),
    ("(1,000)/2", "500"),
    ("0." + "3" * 60, "0." + "3" * 60 + "0"),
]
OTHER = [
    ("3", "4"),
    ("(1,2]", "(1,2)"),
    ("1/0", "5"),
    ("", "1"),
    ("True", "1"),
    ("__import__('os').system('true')", "0"),
    ("().__class__", "1"),
    ("9**9**9**9", "1"),
    ("9" * 1000, "1"),
    ("x" * 5000, "1"),
    ("0.333", "1/3"),
    ("1." + "0" * 20 + "1", "1"),
    ("1234", "(1,234)"),
    ("100000,000", "100000000"),
    ("1 2", "12"),
    ("1\\text{ or }2", "12"),
    ("{1,1}", "{1,2}"),
    ("{1,1,2}", "{1,2}"),
    ("(2,1)", "(1,2)"),
    ("0x10", "16"),
]


@pytest.mark.parametrize(("found", "expected"), EQUAL)
def test_what_is_equal_by_symbols_is_right(found: str, expected: str) -> None:
    assert equal(found, expected)
    assert equal(expected, found)


@pytest.mark.parametrize(("found", "expected"), OTHER)
def test_what_is_not_is_wrong_and_nothing_is_executed(found: str, expected: str) -> None:
    assert not equal(found, expected)


def test_the_last_answer_of_a_response_counts() -> None:
    assert last_answer("first \\boxed{1}, so \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert last_answer("x = 3\n#### 42") == "42"
    assert last_answer("thinking\n7") == "7"
    assert last_answer("\\boxed{never closed") is None
    assert last_answer(" ") is None


def test_maths_rewards_the_right_answer() -> None:
    assert verdict(Maths(), "It is \\boxed{\\frac{3}{6}}", answer="0.5") == 1.0
    assert verdict(Maths(), "It is \\boxed{3}", answer="0.5") == 0.0
    assert verdict(Maths(answer="solution"), "", solution="0.5") == 0.0


def test_an_expression_that_never_ends_is_wrong_after_its_time_and_the_next_is_judged() -> None:
    tower = "+".join(f"(x+{i})^999*(y-{i})^998" for i in range(40))
    started = time.monotonic()
    assert verdict(Maths(seconds=2), f"\\boxed{{{tower}}}", answer="(x+1)^997") == 0.0
    assert verdict(Maths(seconds=2), f"\\boxed{{{'(' * 900}x{')' * 900}}}", answer="1") == 0.0
    assert time.monotonic() - started < 120
    assert verdict(Maths(seconds=60), "\\boxed{2}", answer="2.0") == 1.0


def test_a_process_that_ends_because_of_what_it_judged_before_costs_the_next_answer_nothing() -> None:
    idle, _ = verifier._pool()
    idle.put(subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert verdict(Maths(seconds=60), "\\boxed{2}", answer="2.0") == 1.0


def test_the_wait_for_a_process_that_others_ask_is_not_the_environments_time() -> None:
    _, turns = verifier._pool()
    found: list[float | None] = []
    episode = Handed(time.monotonic())

    def play() -> None:
        EPISODE.set(episode)
        with asyncio.Runner() as runner:
            call = Caller(runner, Maths(seconds=60), seconds=4)
            call.reset(EpisodePrompt("?", None, {"answer": "2.0"}))
            found.append(call.step("\\boxed{2}", [])[1])

    with ExitStack() as others:
        for _ in range(verifier._AT_ONCE):
            others.enter_context(turns)
        player = Thread(target=play)
        player.start()
        time.sleep(6)
        assert player.is_alive()
        assert episode.since is None
    player.join(60)
    assert found == [1.0]
    assert episode.since is not None
    assert not holds_its_thread(episode.since, 0)


def test_json_must_be_what_the_schema_allows() -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert verdict(JsonSchema(schema), '{"a": 1}') == 1.0
    assert verdict(JsonSchema(schema), 'Here:\n```json\n{"a": 1}\n```') == 1.0
    for wrong in ('{"a": "1"}', "{}", "no JSON", "[" * 100_000, '{"a": 1, "b": NaN}'):
        assert verdict(JsonSchema(schema), wrong) == 0.0
    assert verdict(JsonSchema(), "3", schema=json.dumps({"type": "integer"})) == 1.0
    backtracks = {"type": "string", "pattern": "^(a+)+$"}
    assert verdict(JsonSchema(backtracks, seconds=2), '"' + "a" * 50 + '!"') == 0.0


def test_a_schema_that_is_wrong_is_no_fault_of_the_response_and_a_response_can_not_pass_for_that(
    tmp_path: Path,
) -> None:
    (tmp_path / "any.json").write_text("{}")  # is not read: the schema may be a client's
    elsewhere = (tmp_path / "any.json").as_uri()
    for wrong in ({"type": "no type"}, {"pattern": "("}, {"$ref": "#/none"}, {"$ref": elsewhere}):
        with pytest.raises(ValueError, match=r"^json_schema: "):
            verdict(JsonSchema(), '"a"', schema=json.dumps(wrong))
    assert verdict(JsonSchema({"multipleOf": 0.1}), "1" + "0" * 400) == 0.0


def test_a_schema_that_is_none_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="its constructor raised SchemaError"):
        check(EnvironmentConfig(name="json_schema", arguments={"schema": {"type": "no type"}}))


def test_a_constructor_that_exits_is_refused_and_does_not_end_the_run_as_if_it_were_done() -> None:
    with pytest.raises(ValueError, match="its constructor raised SystemExit: 0"):
        check(EnvironmentConfig(name="players:Exiting"))


TESTS = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"])


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("Like so:\n```python\ndef add(a, b):\n    return a + b\n```", 1.0),
        ("def add(a, b):\n    return int(a) + int(b)", 2 / 3),
        ("def add(a, b):", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("import sys; print('passed'); sys.exit(0)", 0.0),
        ("raise SystemExit", 0.0),
        ("def add(a, b):\n    import os; os._exit(0)", 0.0),
    ],
)
def test_the_share_of_tests_that_pass_is_the_reward(code: str, share: float) -> None:
    assert verdict(UnitTests(seconds=60), code, tests=TESTS) == pytest.approx(share)


def test_code_that_hangs_or_reaches_out_fails_its_tests() -> None:
    assert verdict(UnitTests(seconds=2), "while True: pass", tests="assert True") == 0.0
    reaches = "import urllib.request\nurllib.request.urlopen('http://192.0.2.1', timeout=5)"
    assert verdict(UnitTests(seconds=60), reaches, tests="assert True") == 0.0
    assert verdict(UnitTests(seconds=60, whole=True), "def add(a, b):\n    return 3", tests=TESTS) == 0.0


def test_code_that_hangs_takes_its_time_once_and_not_per_test() -> None:
    started = time.monotonic()
    assert verdict(UnitTests(seconds=1), "while True: pass", tests=json.dumps(["assert True"] * 60)) == 0.0
    assert time.monotonic() - started < 30, "of 60 seconds by test"


def test_an_unclosed_fence_does_not_take_for_ever() -> None:
    started = time.monotonic()
    opened = "```" + "\n" * 200_000
    assert code_of(opened) == opened
    assert verdict(JsonSchema({}), opened) == 0.0
    assert time.monotonic() - started < 60, "of minutes"


def test_a_prompt_without_what_is_to_be_verified_by_raises() -> None:
    with pytest.raises(KeyError, match="no metadata 'answer'; it has \\['b'\\]"):
        verdict(Maths(), "1", b="2")
    with pytest.raises(ValueError, match="neither Python code nor a JSON list"):
        verdict(UnitTests(), "1", tests="[]")


def test_code_that_rewards_is_part_of_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"identity_base": "from train.environments.environment import Environment\nclass Base(Environment): pass"}
    files["identity_mine"] = "from identity_base import Base\nclass Mine(Base): pass"
    files["identity_tools"] = "def look(key: str) -> str: return key\ndef verify(prompt, text): return 1.0"
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = {"tools": ["identity_tools:look"], "verifier": "identity_tools:verify", "system": "about:nothing"}
    configs = [EnvironmentConfig(name="tools", arguments=arguments), EnvironmentConfig(name="identity_mine:Mine")]
    seen = []
    for change in ("", "identity_base", "identity_mine", "identity_tools"):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text + ("\n# another" if name == change else ""))
        seen.append([identity(config) for config in configs])
    plain, base, mine, tools = seen
    assert base == [plain[0], base[1]]
    assert base[1] != plain[1]
    assert mine == [plain[0], mine[1]]
    assert mine[1] not in (plain[1], base[1])
    assert tools == [tools[0], plain[1]]
    assert tools[0] != plain[0]


def test_what_an_environment_changes_of_its_arguments_no_other_has() -> None:
    make = maker(EnvironmentConfig(name="json_schema", arguments={"schema": {"type": "integer"}}))
    make().schema["type"] = "string"  # type: ignore[attr-defined]
    assert make().schema == {"type": "integer"}  # type: ignore[attr-defined]


def test_a_changed_setting_is_another_environment() -> None:
    configs = [EnvironmentConfig(name="maths"), EnvironmentConfig(name="maths", arguments={"seconds": 1.0})]
    assert len({identity(config) for config in configs}) == 2
    assert isinstance(maker(configs[0])(), Maths)
