"""Send a real server what nobody should send it, and see that it neither fails, hangs nor gets slower; and send
another what its docs allow, and see that it answers so (``loadtests.fuzz_valid``).

    python -m loadtests.fuzz --cases 10000

So many cases of each kind. Half of the bad ones are made by schemathesis from the server's own OpenAPI page, good ones
among them. The others are bodies that were good until values, bytes or headers of them were changed; some break HTTP
itself. A 5xx is a failure, 503 too, as the load is far within the limits; so is an ``error`` event of a stream that
says one. What the server can do afterwards is held against another that was sent nothing, turn by turn, so that a
machine whose speed drifts treats both alike. The last line printed is one JSON object; the exit code is 1 if anything
is wrong.

A black box: it speaks HTTP and the command line.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from loadtests import fuzz_valid, load
from loadtests.crash import MILLRACE, free_port, run
from loadtests.tiny_model import make_model_folder

READY_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
HANG_S = 60.0
SILENCE_S = 0.5  # a server may wait for more of a request that doesn't say where it ends
SETTLE_S = 30.0
PROBE_S = 4.0
PROBE_TURNS = 5
LEAST_CAPACITY = 0.8
MOST_NEW_FILES = 64

CHAT = [{"role": "user", "content": "hello"}]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": "the mill", "max_tokens": 4}),
    ("/generate", {"prompt": "the mill", "max_tokens": 4, "n": 2, "stream": True, "stop": ["a", "zz"]}),
    ("/generate", {"messages": CHAT, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}),
    (
        "/generate",
        {
            "prompt_token_ids": [5, 6, 7],
            "max_tokens": 4,
            "seed": 7,
            "session_id": "s",
            "user": "u",
            "metadata": {"k": "v"},
            "stop": "x",
        },
    ),
    ("/v1/completions", {"model": "millrace", "prompt": "the mill", "max_tokens": 4}),
    ("/v1/completions", {"model": "millrace", "prompt": ["a", "b"], "max_tokens": 4, "stream": True, "logprobs": 1}),
    ("/v1/chat/completions", {"model": "millrace", "messages": CHAT, "max_tokens": 4, "n": 2, "user": "u"}),
    (
        "/v1/chat/completions",
        {
            "model": "millrace",
            "messages": CHAT,
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["q"],
            "seed": 3,
        },
    ),
    ("/feedback", {"response_id": "r", "kind": "thumb", "value": 1, "feedback_id": "f"}),
    ("/feedback", {"response_id": "r", "kind": "rating", "value": 3}),
    ("/feedback", {"response_id": "r", "kind": "preference", "rejected_response_id": "q", "source": "s"}),
    ("/feedback", {"response_id": "r", "kind": "correction", "text": "better"}),
    ("/feedback/batch", {"feedback": [{"response_id": "r", "kind": "comment", "text": "so so"}] * 3}),
]

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 16, 17, 255, 256, 257, 4096, 4097, 10**6, 2**31 - 1, 2**31, 2**63 - 1, 2**63),
    *(2**64, -(2**63) - 1, 10**400, 0.0, -0.0, 0.001, 0.01, 1e-320, 1.5, 2.0, 2.0001, 1e308, float("inf")),
    *(float("-inf"), float("nan"), "", " ", "a", "1", "true", "null", "\x00", "\ud800", "\udfff\ud800", "é", "🙂" * 50),
    *(
        "\u202e\u0000\uffff",
        "x" * 300,
        "x" * 20_000,
        "%s%n{0}${a}",
        "../../etc/passwd",
        "<s></s><|im_start|>",
        "\n" * 99,
    ),
    *(
        "'; DROP TABLE interactions; --",
        "{{ 7*7 }}{% for x in range(10**9) %}{% endfor %}",
        "00000000-0000-7000-8000-0",
    ),
    *([], {}, [[]], [None], [0] * 300, [-1], ["a"] * 20, [""], [2**63], {"": ""}, {"a": {"b": {"c": []}}}),
    *(
        {"type": "json_object"},
        {"type": "text", "text": "a"},
        [{"type": "image_url", "image_url": {"url": "file:///x"}}],
    ),
]
FURTHER = [
    *("prompt", "messages", "prompt_token_ids", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop"),
    *("seed", "stream", "session_id", "user", "metadata", "logprobs", "stop_token_ids", "response_format", "tools"),
    *("tool_choice", "guided_json", "structured_outputs", "best_of", "echo", "suffix", "logit_bias", "chat_template"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("cache_salt", "kv_transfer_params", "vllm_xargs", "priority", "prompt_embeds", "use_beam_search", "__proto__"),
    *("kind", "value", "text", "name", "rejected_response_id", "feedback_id", "response_id", "source", "feedback"),
]
HEADERS: list[tuple[bytes, bytes]] = [
    (b"X-Request-Id", b"\xff\xfe"),
    (b"X-Request-Id", b"a" * 5000),
    (b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-zz"),
    (b"tracestate", b"=,=,=" * 500),
    (b"Authorization", b"Bearer \x80"),
    (b"X-API-Key", b""),
    (b"Content-Type", b"application/xml; charset=\xff"),
    (b"Content-Encoding", b"gzip"),
    (b"Accept", b"*/*;q=nonsense"),
    (b"Expect", b"100-continue"),
    (b"Cookie", b"a=b; " * 1000),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"99999999999999999999"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"chunked, gzip"),
    (b"Connection", b"upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Host", b"\x00"),
    (b"X-" + b"a" * 70_000, b"b"),
]


@dataclass
class Seen:
    """What the server answered."""

    codes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    def answer(self, what: str, code: int, body: bytes) -> None:
        """Count an answer; keep what is wrong with it."""
        self.codes[str(code)] += 1
        if code >= 500 or re.search(rb'"(status|code)": ?5\d\d\b', body):
            self.failures.append(f"{code} to {what[:2000]}: {body[-500:]!r}")


class Server:
    """``millrace serve`` on a tiny model, from its start until it answers, and to its end."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.home, self.model = folder / "home", folder / "model"
        home = self.home
        run("init", "--model", str(make_model_folder(self.model, 1)), "--home", str(home), "--no-write-config")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        options = ["--home", str(home), "--serve.port", str(self.port), "--serve.engine.threads", "1"]
        options += ["--serve.engine.kv_cache_bytes", str(64 << 20), "--serve.limits.timeout_s", str(HANG_S)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*MILLRACE, "serve", *options], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        self.stop()
        raise SystemExit(f"the server did not get ready:\n{self.log.read_text()[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """Its gauges and counters without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=HANG_S).text
        return {name: float(value) for name, value in re.findall(r"(?m)^([a-z_]+) (\S+)$", text)}

    def settled(self) -> dict[str, float]:
        """The same, once nothing is at work; or as it is after ``SETTLE_S``."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = self.metrics()
            busy = (
                "engine_in_flight",
                "engine_running",
                "engine_waiting",
                "journal_queued_rows",
                "journal_open_streams",
            )
            if not any(now[f"millrace_{name}"] for name in busy) or time.monotonic() > deadline:
                return now
            time.sleep(0.2)

    def rate(self) -> float:
        """Requests a second of one fixed load."""
        numbers = itertools.count()

        def requests() -> Iterator[bytes]:
            while True:
                body = json.dumps({"prompt": f"probe {next(numbers):08}", "max_tokens": 8}).encode()
                yield _http("/generate", body, self.port)

        done = load.run(self.port, [requests() for _ in range(16)], PROBE_S)
        if done.failures:
            raise SystemExit(f"the probe failed: {done.failures[0]}")
        return done.rate

    def stop(self) -> int:
        """SIGTERM; the exit code, -9 if it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def from_the_schema(server: Server, cases: int, seed: int, seen: Seen, say: Callable[[str], None]) -> int:
    """``cases`` requests that schemathesis makes of the OpenAPI page, more of those with a body; returns how many."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    runs = [
        (operation, mode) for operation in operations for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    weights = [10 if operation.method == "post" else 1 for operation, _ in runs]
    session, sent = requests.Session(), 0
    for number, (operation, mode) in enumerate(runs):
        share = max(1, (cases - sent) * weights[number] // sum(weights[number:]))
        try:
            strategy = operation.as_strategy(generation_mode=mode)

            @seeded(seed + number)
            @settings(
                max_examples=share,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(case=strategy)
            def one(case: Any) -> None:
                nonlocal sent
                sent += 1
                what = f"{case.method} {case.formatted_path} {case.query} {case.headers} {str(case.body)[:500]}"
                try:
                    answer = case.call(base_url=server.url, session=session, timeout=HANG_S)
                except requests.Timeout:
                    seen.hangs.append(what)
                except requests.RequestException as error:  # what requests itself does not send
                    seen.codes[type(error).__name__] += 1
                else:
                    seen.answer(what, answer.status_code, answer.content)

            one()
        except Exception as error:
            # An operation without a parameter that could be wrong has no negative cases.
            if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "NoExamples"):
                raise
        say(f"{operation.method.upper()} {operation.path} {mode.value}: {sent} sent, {dict(seen.codes)}")
    return sent


async def mutated(server: Server, cases: int, seed: int, seen: Seen, say: Callable[[str], None]) -> int:
    """``cases`` requests that were good before they were changed; how many were sent."""
    chance = random.Random(seed)
    numbers = iter(range(cases))

    async def client() -> None:
        for number in numbers:
            if number and number % 1000 == 0:
                say(f"{number} changed requests: {dict(seen.codes)}")
            path, body = chance.choice(GOOD)
            content = _changed(body, chance)
            broken = chance.random() < 0.15
            request = _http(path, content, server.port, _headers(chance) if broken else [])
            if broken and chance.random() < 0.5:
                request = _scramble(request, chance)
            await _send(server.port, request, strict=not broken, seen=seen)

    await asyncio.gather(*(client() for _ in range(16)))
    return cases


async def _send(port: int, request: bytes, *, strict: bool, seen: Seen) -> None:
    """``strict``: HTTP is kept, so there must be an answer."""
    what = repr(request[:1500])
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), HANG_S)
    try:
        writer.write(request)
        async with asyncio.timeout(HANG_S if strict else SILENCE_S):
            answer = await reader.read(-1)
    except TimeoutError:
        if strict:
            seen.hangs.append(what)
        else:
            seen.codes["silence"] += 1
        return
    except ConnectionError:
        seen.codes["connection reset"] += 1
        return
    finally:
        writer.close()
    codes = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    if final := [code for code in codes if code >= 200]:
        seen.answer(what, final[0], answer)
    elif strict:
        seen.failures.append(f"no HTTP to {what}: {answer[:200]!r}")
    else:
        seen.codes["no answer"] += 1


def _http(path: str, body: bytes, port: int, headers: list[tuple[bytes, bytes]] | None = None) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: 127.0.0.1:%d" % port, b"Content-Type: application/json"]
    lines += [b"%b: %b" % header for header in headers or []]
    if headers is not None:
        lines.append(b"Connection: close")
    lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _headers(chance: random.Random) -> list[tuple[bytes, bytes]]:
    return chance.sample(HEADERS, chance.choice((1, 1, 1, 2, 3)))


def _changed(body: dict[str, Any], chance: random.Random) -> bytes:
    """A good body with one to three changes, of its values or of its bytes."""
    changed = copy.deepcopy(body)
    if chance.random() < 0.75:
        for _ in range(chance.choice((1, 1, 2, 3))):
            _change_a_value(changed, chance)
    content = json.dumps(changed, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    if chance.random() < 0.35:
        for _ in range(chance.choice((1, 1, 2, 5))):
            content = _scramble(content, chance)
    return content


def _change_a_value(body: dict[str, Any], chance: random.Random) -> None:
    places = list(_places(body))
    if not places:
        return
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.55:
        holder[key] = copy.deepcopy(chance.choice(NASTY))
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.9:
        body[chance.choice(FURTHER)] = copy.deepcopy(chance.choice(NASTY))
    elif kind < 0.95:
        holder[key] = [holder[key]] * chance.choice((1, 2, 50))
    else:
        nested: Any = holder[key]
        for _ in range(chance.choice((5, 50, 400))):
            nested = [nested] if chance.random() < 0.5 else {"a": nested}
        holder[key] = nested


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(Holder, key or index) of every value below ``value``."""
    for key, below in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(below, dict | list):
            yield from _places(below)


def _scramble(content: bytes, chance: random.Random) -> bytes:
    """The bytes with a piece changed, cut out, doubled or put in."""
    at = chance.randrange(len(content) + 1)
    end = min(len(content), at + chance.choice((1, 1, 2, 8, 64)))
    kind = chance.randrange(8)
    if kind == 0 and content:
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if kind == 1:
        return content[:at] + content[end:]
    if kind == 2:
        return content[:end] + content[at:]
    if kind == 3:
        return content[:at] + chance.randbytes(chance.choice((1, 2, 16, 500))) + content[at:]
    if kind == 4:
        return content[:at]
    if kind == 5:
        return content[:at] + b"[" * chance.choice((10, 200, 100_000)) + content[at:]
    if kind == 6:
        return b"\xef\xbb\xbf" + content
    return (
        content[:at]
        + chance.choice((b"NaN", b"-Infinity", b"1e999", b"\\ud800", b"\x00", b"//", b'""'))
        + content[end:]
    )


def fuzz(cases: int, folder: Path, seed: int) -> dict[str, Any]:
    """Start the server, send it ``cases`` requests, and say how it took them."""
    seen = Seen()
    started = time.monotonic()
    server = Server(folder / "fuzzed")
    try:
        before = server.rate()
        at_first = server.settled()
        sent = from_the_schema(server, cases // 2, seed, seen, say)
        sent += asyncio.run(mutated(server, cases - sent, seed, seen, say))
        at_last = server.settled()
        ratio, after = compare(server, folder / "untouched")
        is_ready = httpx.get(f"{server.url}/ready", timeout=HANG_S).status_code == 200
    finally:
        code = server.stop()
    for text in (*seen.failures[:20], *(f"hang: {hang}" for hang in seen.hangs[:20])):
        say(text)
    return {
        "cases": sent,
        "five_hundreds": len(seen.failures),
        "hangs": len(seen.hangs),
        "capacity_after_over_before": round(ratio, 3),
        "requests_per_second": [round(before, 1), round(after, 1)],
        "left_in_flight": int(at_last["millrace_engine_in_flight"] + at_last["millrace_journal_open_streams"]),
        "journal_healthy": at_last["millrace_journal_healthy"] == 1,
        "ready": is_ready,
        "new_open_files": int(at_last["process_open_fds"] - at_first["process_open_fds"]),
        "new_megabytes": round(
            (at_last["process_resident_memory_bytes"] - at_first["process_resident_memory_bytes"]) / 2**20
        ),
        "tracebacks": server.log.read_text().count("Traceback (most recent call last)"),
        "exit_code": code,
        "answers": dict(sorted(seen.codes.items())),
        "seconds": round(time.monotonic() - started, 1),
    }


def valid(cases: int, folder: Path, seed: int) -> dict[str, Any]:
    """Start a server, send it ``cases`` valid requests, and say what is wrong with its answers."""
    started = time.monotonic()
    server = Server(folder / "valid")
    try:
        outcome = fuzz_valid.fuzz(fuzz_valid.Prober(server.url, server.home, server.model), cases, seed, say)
        at_last = server.settled()
    finally:
        code = server.stop()
    return outcome.summary() | {
        "left_in_flight": int(at_last["millrace_engine_in_flight"] + at_last["millrace_journal_open_streams"]),
        "tracebacks": server.log.read_text().count("Traceback (most recent call last)"),
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
    }


def compare(server: Server, folder: Path) -> tuple[float, float]:
    """(What the server does over what one does that was sent nothing, its requests a second); medians of some turns."""
    other = Server(folder)
    try:
        pairs = [(server.rate(), other.rate()) for _ in range(PROBE_TURNS + 1)][1:]  # the first ones are slower
    finally:
        other.stop()
    return statistics.median(mine / its for mine, its in pairs), statistics.median(mine for mine, _ in pairs)


def wrong(result: dict[str, Any]) -> bool:
    """Whether a run of one kind shows that something is."""
    if "faults" in result:
        return any(result[name] for name in ("faults", "left_in_flight", "tracebacks", "exit_code"))
    return bool(
        result["five_hundreds"]
        or result["hangs"]
        or result["left_in_flight"]
        or result["tracebacks"]
        or result["exit_code"]
        or not result["journal_healthy"]
        or not result["ready"]
        or result["capacity_after_over_before"] < LEAST_CAPACITY
        or result["new_open_files"] > MOST_NEW_FILES
    )


def say(text: str) -> None:
    print(text, flush=True)


KINDS: Final[dict[str, Callable[[int, Path, int], dict[str, Any]]]] = {"valid": valid, "bad": fuzz}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="requests of each kind to send")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which kinds")
    parser.add_argument("--seed", type=int, default=1, help="of what is sent")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"), help="a folder of its own; emptied first")
    options = parser.parse_args()
    if options.cases < 100:
        parser.error("--cases must be at least 100")
    shutil.rmtree(options.folder, ignore_errors=True)
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    os.environ["PYTHONUNBUFFERED"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    results = {kind: KINDS[kind](options.cases, folder, options.seed) for kind in options.kinds}
    print(json.dumps(results))
    sys.exit(any(wrong(result) for result in results.values()))


if __name__ == "__main__":
    main()
