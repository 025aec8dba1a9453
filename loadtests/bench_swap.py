"""Swaps under streaming clients, as the clients see them: ``make bench-swap``.

For a model of 3M parameters in float32 and one of 0.6B in bfloat16 (the shape of Qwen3-0.6B, with its output head
apart and half its vocabulary, so with as many parameters), a real server streams to 32 clients while `millrace
promote` goes back and forth between two policies: with the second set of weights made for each swap (``default``),
kept (``standby``), and with none (``in_place``). Every token of the one policy is a small letter and every token of
the other a capital one, so that the text itself says which policy sampled each token. ``vllm`` is vLLM's own server,
with the same model, clients, flags and environment (``vllm_peer``) and its own way: pause (mode keep), reload the
weights from the folder, resume, and answer a request. The text that comes then must be the other policy's, or the
benchmark fails.

A gap is the time between two arrivals of text in one stream. Of each swap the longest gap of all streams counts, from
the start of `millrace promote` to one second after `GET /policy` reports the new version: ``gap_ms`` is the mean over
the swaps, and ``gap_worst_ms`` the longest. ``control_gap_ms`` is the same mean of windows after each swap, each as
long as the swap before it, in which `millrace policies` runs in place of `millrace promote` (of vLLM's server:
nothing): what the machine does to 32 streams without a swap. ``decode_step_ms`` is the median gap of these windows. The
bar is that the mean longest gap of a swap less the control's is at most one decode step, by the 95 % interval of that
difference (Welch's).

``hold_ms`` is the median longest gap less the normal p99 gap; ``crossing_ms`` looks only at gaps between a token of
one policy and the next one, of the other, in the same stream: the p99 of them, less the normal p99. ``copy_ms`` is
what it takes to copy as many bytes as the weights have from one place in memory to another.

The last line printed is one JSON object: ``swaps``, ``failed``, ``truncated`` and ``mislabelled`` over all modes but
vLLM's; by size ``gap_ms``, ``gap_worst_ms``, ``control_gap_ms`` and ``decode_step_ms`` of the default mode,
``vllm_gap_ms``, ``vllm_gap_worst_ms`` and ``vllm_control_gap_ms``; and all of each mode under ``modes``. An end of an
interval that one swap leaves open is null.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scipy.stats import ttest_ind

from loadtests import vllm_peer
from loadtests.closed_loop import no_collector
from loadtests.server import MILLRACE, Server, free_port, run

LETTERS: Final = {1: set(string.ascii_lowercase), 2: set(string.ascii_uppercase)}
CONTEXT: Final = 512
SETTLE_TIMEOUT_S: Final = 180
RESPONSE_TIMEOUT_S: Final = 240
AFTER_S: Final = 1.0
MODES: Final = {
    "default": {"serve.swap.shadow_weights": "false"},
    "standby": {"serve.swap.shadow_weights": "true"},
    "in_place": {"serve.swap.in_place": "true"},
}
VLLM: Final = "vllm"


@dataclass(frozen=True)
class Size:
    """A model to measure with. ``tokens``: of a response on average, from half to one and a half times as many.

    Of one length, all responses would come to their ends in one step, and the next 32 prompts would be read in another.
    ``anchor``: channel 0 of the residual stream, large beside what the layers add to the others.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    dtype: str
    tokens: int
    kv_cache: int
    swaps: int
    anchor: float


SIZES: Final = (
    Size("3M", 256, 768, 4, 4, 2, 64, 258, "float32", 200, 128 << 20, 12, 20.0),
    Size("0.6B", 1024, 3072, 28, 16, 8, 128, 76_800, "bfloat16", 128, 1 << 30, 5, 200.0),
)


@dataclass
class Stream:
    """One response as it came. ``tokens``: requested; ``arrivals``: (time, characters) of each piece of text."""

    tokens: int
    arrivals: list[tuple[float, str]] = field(default_factory=list)
    body: dict[str, Any] | None = None
    failure: str | None = None


@dataclass
class Window:
    """The time of one swap, or of a command that swaps nothing. ``version``: of the policy that serves at its end."""

    began: float
    ended: float
    version: int
    hold_ms: float = 0.0


# ---------------------------------------------------------------------------------------------------- the measurement


def bench(size: Size, home: Path, mode: str, *, clients: int, swaps: int) -> dict[str, Any]:
    """One server, one mode."""
    with Target(size, home, mode) as target:
        streams: list[Stream] = []
        with no_collector():
            normal, swapped = asyncio.run(measure(target, streams, clients, swaps))
        memory = memory_of(target.process.pid)
    if mode == VLLM:
        require_letters(streams, normal)
    return summary(streams, normal, swapped, labelled=mode != VLLM) | {"mode": mode, **memory}


async def measure(target: Target, streams: list[Stream], clients: int, swaps: int) -> tuple[list[Window], list[Window]]:
    """Stream to all clients; a window without a swap after each swap, as the machine's speed drifts."""
    stop = asyncio.Event()
    work = [asyncio.create_task(client(target, number, streams, stop)) for number in range(clients)]
    await asyncio.sleep(3)  # until all are at different places in their responses
    # The first swap of a server is not like those after it: the helper's files are not in memory yet.
    await target.swap(2)
    normal, swapped = [], []
    for number in range(swaps):
        swapped.append(await target.swap(1 + number % 2))
        normal.append(await target.idle(swapped[-1]))
    stop.set()
    _, late = await asyncio.wait(work, timeout=RESPONSE_TIMEOUT_S)
    for task in late:
        task.cancel()
    for task in work:
        if task not in late:
            task.result()
    return normal, swapped


async def swap(home: Path, url: str, version: int) -> Window:
    """`millrace promote`, and wait until the server has it."""
    began = time.perf_counter()
    await command(home, "promote", str(version), "--no-wait", "--override", "--why", "bench")
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        policy = await asyncio.to_thread(get, f"{url}/policy")
        if policy["failed"]:
            raise SystemExit(f"policy {version} was refused: {policy['failed']}")
        if policy["version"] == version and policy["swaps"] and policy["swaps"][-1]["to"] == version:
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"policy {version} does not serve after {SETTLE_TIMEOUT_S} s")
        await asyncio.sleep(0.1)
    await asyncio.sleep(AFTER_S)
    return Window(began, time.perf_counter(), version, policy["swaps"][-1]["hold_ms"])


async def idle(home: Path, after: Window) -> Window:
    """As long as the swap before it, and with a command, without a swap."""
    began = time.perf_counter()
    await command(home, "policies")
    await asyncio.sleep(max(AFTER_S, began + after.ended - after.began - time.perf_counter()))
    return Window(began, time.perf_counter(), after.version)


async def command(home: Path, *arguments: str) -> None:
    """Run `millrace …` at the lowest priority: an operator's command runs elsewhere than the server."""
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", MILLRACE, *arguments, "--home", str(home), cwd=home, stdout=asyncio.subprocess.DEVNULL
    )
    if code := await asyncio.wait_for(process.wait(), 120):
        raise SystemExit(f"millrace {' '.join(arguments)} ended with {code}")


def summary(streams: list[Stream], normal: list[Window], swapped: list[Window], *, labelled: bool) -> dict[str, Any]:
    """Figures of one mode; times in milliseconds."""
    every = [gap for stream in streams for gap in gaps(stream)]
    quiet = [
        (after - before) * 1e3
        for before, after, _ in every
        if any(window.began <= before and after <= window.ended for window in normal)
    ]
    p99 = percentile(quiet, 0.99)
    control = [longest(every, window) for window in normal]
    during = [longest(every, window) for window in swapped]
    crossing = [(after - before) * 1e3 for before, after, crossed in every if crossed]
    return {
        "swaps": len(swapped),
        "responses": len(streams),
        "failed": sum(stream.failure is not None for stream in streams),
        "failures": sorted({stream.failure for stream in streams if stream.failure})[:5],
        "truncated": sum(is_truncated(stream, labelled=labelled) for stream in streams),
        "mislabelled": sum(mislabelled(stream) for stream in streams),  # vLLM's stream names no policy
        "crossed": len(crossing),
        "gap_ms": statistics.fmean(during),
        "control_gap_ms": statistics.fmean(control),
        "added_ms": interval(during, control),
        "decode_step_ms": percentile([gap for gap in quiet if gap > 0], 0.5),  # 0: read at once
        "gap_p99_ms": p99,
        "gap_worst_ms": max(during),
        "gap_each_swap_ms": [round(gap, 1) for gap in during],
        "control_each_ms": [round(gap, 1) for gap in control],
        "crossing_p50_ms": percentile(crossing, 0.5),
        "crossing_p99_ms": percentile(crossing, 0.99),
        "hold_ms": max(0.0, statistics.median(during) - p99),
        "control_ms": max(0.0, statistics.median(control) - p99),
        "crossing_ms": max(0.0, percentile(crossing, 0.99) - p99),
        "server_hold_ms": statistics.median(window.hold_ms for window in swapped),
        "swap_s": statistics.median(window.ended - window.began for window in swapped) - AFTER_S,
    }


def gaps(stream: Stream) -> list[tuple[float, float, bool]]:
    """(from, to, whether another policy sampled the second) of each two arrivals."""
    return [
        (before, after, text[-1:].islower() != later[:1].islower())
        for (before, text), (after, later) in zip(stream.arrivals, stream.arrivals[1:], strict=False)
    ]


def longest(every: list[tuple[float, float, bool]], window: Window) -> float:
    """The longest gap that lies in a window, in whole or in part; milliseconds."""
    return max(
        ((after - before) * 1e3 for before, after, _ in every if before < window.ended and after > window.began),
        default=0.0,
    )


def is_truncated(stream: Stream, *, labelled: bool) -> bool:
    """Whether less came than requested, or another text than in the last event."""
    if stream.failure is not None:
        return False
    text = "".join(text for _, text in stream.arrivals)
    if not labelled:
        return len(text) != stream.tokens
    if stream.body is None:
        return True
    (response,) = stream.body["responses"]
    return len(text) != stream.tokens or response["text"] != text or response["finish_reason"] != "length"


def mislabelled(stream: Stream) -> int:
    """Tokens whose letter is not of the policy that the response's spans name."""
    if stream.body is None:
        return 0
    (response,) = stream.body["responses"]
    text, spans = response["text"], response["policy_spans"]
    ends = [span["start"] for span in spans[1:]] + [len(text)]
    return sum(
        character not in LETTERS[span["policy_version"]]
        for span, end in zip(spans, ends, strict=True)
        for character in text[span["start"] : end]
    )


def require_letters(streams: list[Stream], normal: list[Window]) -> None:
    """The text in each window after a swap must be of the policy that it brought. Raises SystemExit."""
    arrivals = [arrival for stream in streams for arrival in stream.arrivals]
    for window in normal:
        text = "".join(text for at, text in arrivals if window.began <= at <= window.ended)
        wrong = sum(letter not in LETTERS[window.version] for letter in text)
        if not text or wrong:
            raise SystemExit(
                f"vLLM's reload did not bring policy {window.version}: of {len(text)} letters that came after it, "
                f"{wrong} are another policy's"
            )


def interval(values: list[float], others: list[float]) -> list[float | None]:
    """The difference of two means, its 95 % interval as Welch has it; None for ends that one value leaves open."""
    if min(len(values), len(others)) < 2:
        return [None, None]
    found = ttest_ind(values, others, equal_var=False).confidence_interval(0.95)
    return [round(end, 1) if math.isfinite(end) else None for end in (float(found.low), float(found.high))]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


# ------------------------------------------------------------------------------------------------------------ clients


async def client(target: Target, number: int, streams: list[Stream], stop: asyncio.Event) -> None:
    """Request one stream after the other."""
    request, chance, tokens = 0, random.Random(number), target.size.tokens
    while not stop.is_set():
        stream = Stream(chance.randint(tokens // 2, tokens * 3 // 2))
        streams.append(stream)
        request += 1
        fields = {"prompt": f"client {number} asks {request}", "max_tokens": stream.tokens, "stream": True}
        body = json.dumps(fields | target.fields).encode()
        head = (
            f"POST {target.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", target.port), 10)
            writer.write(head.encode() + body)
            try:
                await asyncio.wait_for(read(reader, stream), RESPONSE_TIMEOUT_S)
            finally:
                writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            stream.failure = f"{type(error).__name__}: {error}"


async def read(reader: asyncio.StreamReader, stream: Stream) -> None:
    """Keep what comes with its time, and take it apart only when all is there."""
    chunks: list[tuple[float, bytes]] = []
    while chunk := await reader.read(1 << 16):
        chunks.append((time.perf_counter(), chunk))
    whole = b"".join(chunk for _, chunk in chunks)
    head, _, rest = whole.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        stream.failure = f"answered {whole[:200]!r}"
        return
    position = len(head) + 4
    arrivals = iter(chunks)
    at, seen = 0.0, 0
    while b"\r\n" in rest:
        length, _, after = rest.partition(b"\r\n")
        count = int(length, 16)
        if count == 0:
            break
        position += len(length) + 2 + count + 2
        while seen < position:
            at, chunk = next(arrivals)
            seen += len(chunk)
        for event in after[:count].decode().split("\n\n"):
            take(event, at, stream)
        rest = after[count + 2 :]


def take(event: str, at: float, stream: Stream) -> None:
    """An event of our stream has a name, one of vLLM's has none."""
    name, _, data = event.partition("\n")
    if name.startswith("data: {"):
        content = json.loads(name.removeprefix("data: "))
        text = content["choices"][0]["text"] if "choices" in content else None
        if text is None:
            stream.failure = name[:200]
        elif text:
            stream.arrivals.append((at, text))
        return
    if not data:
        return
    content = json.loads(data.removeprefix("data: "))
    if name == "event: delta":
        if content["text"]:
            stream.arrivals.append((at, content["text"]))
    elif name == "event: done":
        stream.body = content
    else:
        stream.failure = f"{name}: {data[:200]}"


# --------------------------------------------------------------------------------------------------- server and models


class Target(Server):
    """A server on the home, policy 1 first: Millrace in one of its modes, or vLLM's own on that policy's folder."""

    def __init__(self, size: Size, home: Path, mode: str) -> None:
        self.size, self.home, self.mode = size, home, mode
        port = free_port()
        if mode == VLLM:
            self.path, self.fields = "/v1/completions", {"model": "model"}
            command = vllm_peer.command(self.folder(1), port, dtype=size.dtype, kv_cache_bytes=size.kv_cache)
            flags: dict[str, Any] = {"--max-model-len": CONTEXT}
            variables = vllm_peer.variables() | {"VLLM_SERVER_DEV_MODE": "1"}  # for pause, reload and resume
        else:
            self.path, self.fields = "/generate", {}
            command, variables = [MILLRACE, "serve", "--home", str(home)], {}
            flags = {"--serve.port": port, "--serve.swap.poll_seconds": 0.1}
            flags |= {"--serve.engine.kv_cache_bytes": size.kv_cache, "--serve.engine.max_model_len": CONTEXT}
            flags |= {f"--{name}": value for name, value in MODES[mode].items()}
        command += [str(text) for flag in flags.items() for text in flag]
        super().__init__(command, port, home / f"{mode}.log", "/health" if mode == VLLM else "/ready", variables)

    def folder(self, version: int) -> Path:
        return self.home / f"policies/v{version:06d}"

    async def swap(self, version: int) -> Window:
        if self.mode != VLLM:
            return await swap(self.home, self.url, version)
        began = time.perf_counter()
        await asyncio.to_thread(post, f"{self.url}/pause?mode=keep")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder(version))}}
        await asyncio.to_thread(post, f"{self.url}/collective_rpc", reload)
        await asyncio.to_thread(post, f"{self.url}/resume")
        # Its steps go on some time after it says so, with 0.6B parameters after seconds: the window lasts till then.
        await asyncio.to_thread(post, f"{self.url}{self.path}", self.fields | {"prompt": "a", "max_tokens": 1})
        await asyncio.sleep(AFTER_S)
        return Window(began, time.perf_counter(), version)

    async def idle(self, after: Window) -> Window:
        """As long as the swap before it, without one."""
        if self.mode != VLLM:
            return await idle(self.home, after)
        began = time.perf_counter()
        await asyncio.sleep(after.ended - after.began)
        return Window(began, time.perf_counter(), after.version)


def post(url: str, body: dict[str, Any] | None = None) -> None:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=SETTLE_TIMEOUT_S).close()


def make_home(size: Size, folder: Path) -> Path:
    """A home with two policies: small letters and capital ones."""
    homes = []
    for version, letters in LETTERS.items():
        model = make_model(size, folder / f"model-{version}", seed=version, letters=letters)
        home = folder / f"home-{version}"
        run("init", "--model", str(model), "--home", str(home), "--no-write-config")
        shutil.rmtree(model)
        homes.append(home)
    # The second home's policy becomes policy 2 of the first; ARCHITECTURE.md says what a policy's folder is.
    target = homes[0] / "policies/v000002"
    shutil.move(homes[1] / "policies/v000001", target)
    manifest = json.loads((target / "policy.json").read_text())
    (target / "policy.json").write_text(json.dumps(manifest | {"version": 2, "parent": 1}))
    shutil.rmtree(homes[1])
    return homes[0]


def make_model(size: Size, folder: Path, *, seed: int, letters: set[str]) -> Path:
    """A random Qwen3 whose every token is one of ``letters``.

    Channel 0 of the residual stream is the same large number at every token, since no layer writes to it; the output
    head gives the letters much for it and the other tokens as much less.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config

    from loadtests.tiny_model import make_model_folder

    dtype = getattr(torch, size.dtype)
    make_model_folder(folder, seed)  # for its tokenizer
    (folder / "model.safetensors").unlink()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        dtype=size.dtype,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    block = (torch.randn(1 << 20, generator=generator) * 0.05).to(dtype)

    def noise(rows: int, columns: int) -> torch.Tensor:
        first = int(torch.randint(1 << 19, (1,), generator=generator))
        count = rows * columns
        return block[first:].repeat(count // (len(block) - first) + 1)[:count].reshape(rows, columns).clone()

    ones = torch.ones(size.hidden, dtype=dtype)
    weights = {"model.embed_tokens.weight": noise(size.vocabulary, size.hidden) * 10, "model.norm.weight": ones}
    weights["model.embed_tokens.weight"][:, 0] = size.anchor
    head = noise(size.vocabulary, size.hidden)
    head[:, 0] = -8
    head[[vocabulary[letter] for letter in sorted(letters)], 0] = 8
    weights["lm_head.weight"] = head
    for layer in range(size.layers):
        name = f"model.layers.{layer}"
        into = {
            "self_attn.q_proj": size.heads * size.head,
            "self_attn.k_proj": size.kv_heads * size.head,
            "self_attn.v_proj": size.kv_heads * size.head,
            "mlp.gate_proj": size.intermediate,
            "mlp.up_proj": size.intermediate,
        }
        weights |= {f"{name}.{part}.weight": noise(rows, size.hidden) for part, rows in into.items()}
        for part, columns in {"self_attn.o_proj": size.heads * size.head, "mlp.down_proj": size.intermediate}.items():
            out = noise(size.hidden, columns)
            out[0] = 0
            weights[f"{name}.{part}.weight"] = out
        weights |= {
            f"{name}.self_attn.{part}.weight": torch.ones(size.head, dtype=dtype) for part in ("q_norm", "k_norm")
        }
        weights |= {f"{name}.{part}.weight": ones.clone() for part in ("input_layernorm", "post_attention_layernorm")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


COPY: Final = """
import sys, time, torch
one = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
other = torch.zeros_like(one)
best = 1e9
for _ in range(15):
    began = time.perf_counter()
    other.copy_(one)
    best = min(best, time.perf_counter() - began)
print(best * 1e3)
"""


def copy_ms(size: int) -> float:
    """Best time to copy ``size`` bytes in memory, the server not running."""
    done = subprocess.run(
        [sys.executable, "-c", COPY, str(size)], capture_output=True, text=True, timeout=120, check=True
    )
    return float(done.stdout)


def memory_of(process: int) -> dict[str, float]:
    """Most memory that the server's processes had, and have, in MiB; of the engine, which is the largest."""
    largest = {"engine_peak_mib": 0.0, "engine_mib": 0.0}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            if int(fields["PPid"]) == process:
                peak, now = (int(fields[name].split()[0]) / 1024 for name in ("VmHWM", "RssAnon"))
                if peak > largest["engine_peak_mib"]:
                    largest = {"engine_peak_mib": round(peak), "engine_mib": round(now)}
    return largest


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        content: dict[str, Any] = json.loads(answer.read())
        return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model and a few swaps: a smoke test")
    parser.add_argument("--clients", type=int, default=32, help="streams at a time")
    parser.add_argument("--swaps", type=int, help="swaps of each server; by default 12 of the small model's, 5 else")
    parser.add_argument("--sizes", nargs="+", choices=[size.name for size in SIZES], help="only these models")
    every = [*MODES, VLLM]
    parser.add_argument("--modes", nargs="+", choices=every, default=every, help="only these")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the folder of the run goes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    modes: list[dict[str, Any]] = []
    for size in SIZES:
        if size.name not in (options.sizes or [one.name for one in SIZES]) or (options.quick and size is not SIZES[0]):
            continue
        swaps = options.swaps or (3 if options.quick else size.swaps)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder.absolute()) as folder:
            home = make_home(size, Path(folder))
            weight_bytes = sum(path.stat().st_size for path in (home / "policies/v000001").glob("*.safetensors"))
            copy = copy_ms(weight_bytes)
            for mode in options.modes:
                result = bench(size, home, mode, clients=options.clients, swaps=swaps)
                result = {"model": size.name, "weights_mib": weight_bytes / 2**20, "copy_ms": copy, **result}
                modes.append({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()})
                print(json.dumps(modes[-1]), flush=True)
                back = ["promote", "1", "--no-wait", "--override", "--why", "bench"]
                run(*back, "--home", str(home), folder=home)  # for the next server
    print(json.dumps(result_of(modes), allow_nan=False))


def result_of(modes: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [mode for mode in modes if mode["mode"] != VLLM]

    def of(mode: str, figure: str) -> dict[str, Any]:
        return {each["model"]: each[figure] for each in modes if each["mode"] == mode}

    figures = ("gap_ms", "gap_worst_ms", "control_gap_ms", "decode_step_ms", "added_ms")
    counts = {name: sum(mode[name] for mode in ours) for name in ("swaps", "failed", "truncated", "mislabelled")}
    bars: dict[str, Any] = {
        name: {"bar": "at most 0", "verdict": "met" if counts[name] == 0 else "missed"}
        for name in ("failed", "truncated", "mislabelled")
    }
    for mode in ours:
        if mode["mode"] != "in_place":  # there no token can be sampled while the weights are loaded
            (low, high), bar = mode["added_ms"], mode["decode_step_ms"]
            if low is None or high is None:
                verdict = "undecided"
            else:
                verdict = "met" if high <= bar else "missed" if low > bar else "undecided"
            bars[f"{mode['model']} {mode['mode']}"] = {"bar": f"added at most {bar} ms", "verdict": verdict}
    return {
        **counts,
        **{name: of("default", name) for name in figures},
        "in_place_gap_ms": of("in_place", "gap_ms"),
        "standby_gap_ms": of("standby", "gap_ms"),
        "vllm_gap_ms": of(VLLM, "gap_ms"),
        "vllm_gap_worst_ms": of(VLLM, "gap_worst_ms"),
        "vllm_control_gap_ms": of(VLLM, "control_gap_ms"),
        "modes": {f"{mode['model']} {mode['mode']}": mode for mode in modes},
        "bars": bars,
    }


if __name__ == "__main__":
    main()
