"""How many users does this server hold? ``make loadtest PROFILE=mixed USERS=64 SECONDS=120``.

Simulated users (``loadtests/locustfile.py``) load a server, and thresholds decide the exit code: 0 if all were kept.
The server is that of the environment variable ``URL``, with the key ``KEY`` (scopes generate and feedback, and admin
for /metrics); without a URL, one of its own on a tiny model. A ramp says how many users it holds and where it breaks; a
soak says whether its memory grows. In ``--out``: index.html, result.json, the users' account, samples of the server.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from loadtests.capacity import figures
from loadtests.capacity.observe import Observer, local_server
from loadtests.capacity.page import page
from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import make_model_folder

LOCUSTFILE: Final = Path(__file__).parent.parent / "locustfile.py"
PROFILES: Final = {
    "generate": "GenerateUser",
    "chat": "ChatUser",
    "stream": "StreamUser",
    "feedback": "FeedbackUser",
    "mixed": "SessionUser",
}
SHAPES: Final = ("steady", "ramp", "spike", "soak")
CONTEXT: Final = 2048
STOP_S: Final = 60
SETTINGS: Final = {"serve.engine.kv_cache_bytes": str(64 << 20)}


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the users and the server end with this
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with serving(options.option, out) as (url, server):
        account, samples, code, trouble = load(options, url, server, out)
    found = judge(options, account, samples, code, trouble)
    title = f"{options.profile}, {options.shape}: {options.users} users for {options.seconds} s"
    (out / "result.json").write_text(json.dumps(found, indent=1))
    (out / "index.html").write_text(page(title, found, account, samples))
    print(f"see {out / 'index.html'}", flush=True)
    print(json.dumps({name: value for name, value in found.items() if name not in ("levels", "routes")}))
    sys.exit(0 if found["passed"] else 1)


@contextlib.contextmanager
def serving(options: list[str], out: Path) -> Iterator[tuple[str, psutil.Process | None]]:
    """The server to load: the given one, or one of its own until the block ends."""
    if url := os.environ.get("URL", ""):
        yield url.rstrip("/"), local_server(url)
        return
    print("starting a server on a tiny random model: a minute or two", flush=True)
    with tempfile.TemporaryDirectory(prefix="loadtest-") as temporary:
        home, port = Path(temporary), free_port()
        model = make_model_folder(home / "model", 0, context=CONTEXT, eos=False, printable=True)
        given = SETTINGS | dict(one.split("=", 1) for one in options) | {"home": str(home), "serve.port": str(port)}
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        run("init", "--model", str(model), *flags, folder=home)
        try:
            with Server([MILLRACE, "serve", *flags], port, home / "serve.log") as server:
                yield server.url, psutil.Process(server.process.pid)
        finally:
            shutil.copy(home / "serve.log", out / "serve.log")


def load(
    options: argparse.Namespace, url: str, server: psutil.Process | None, out: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int, str | None]:
    """Have the users go; their account, samples of the server, locust's exit code, and why /metrics was not read."""
    key = os.environ.get("KEY", "")
    headers = {"X-API-Key": key} if key else {}
    try:
        httpx.get(f"{url}/ready", headers=headers, timeout=30).raise_for_status()
    except httpx.HTTPError as error:
        raise SystemExit(f"{url} is not ready: {error}") from error
    file = out / "account.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "locust", "-f", str(LOCUSTFILE), PROFILES[options.profile], "--headless"]
    command += ["--host", url, "--users", str(options.users), "--spawn-rate", str(options.users)]
    command += ["--run-time", str(options.seconds), "--stop-timeout", str(STOP_S), "--shape", options.shape]
    command += ["--account", str(file), "--pace", str(options.pace), "--max-tokens", str(options.max_tokens)]
    command += ["--model", options.model, "--only-summary"]
    command += ["--prompts", str(options.prompts)] if options.prompts else []
    print(f"{options.users} users ({options.profile}, {options.shape}) load {url} for {options.seconds} s", flush=True)
    users = subprocess.Popen(command)
    try:
        with Observer(url, headers, server, psutil.Process(users.pid)) as observer:
            # locust's exit code is 1 if a request failed: what fails how often is judged here
            code = users.wait(options.seconds + STOP_S + 60)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the users had not ended {STOP_S + 60} s after their time: see {file}") from None
    finally:
        users.kill()
    account = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    (out / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in observer.samples))
    return account, observer.samples, code, observer.trouble


def judge(
    options: argparse.Namespace,
    account: list[dict[str, Any]],
    samples: list[dict[str, Any]],
    code: int,
    trouble: str | None,
) -> dict[str, Any]:
    """What was found, and whether it passed."""
    errors = options.errors if options.errors is not None else 0.0 if options.shape == "soak" else 0.001
    limits = figures.Limits(options.p95, options.first_token, errors, options.growth)
    cores = os.cpu_count() or 1
    found = figures.summary(account, samples, options.shape, limits, hold=options.hold, cores=cores)
    if code not in (0, 1):
        found["passed"], found["problems"] = False, [f"locust ended with {code}", *found["problems"]]
    loads = [sample["machine_load"] for sample in samples if "machine_load" in sample]
    load_words = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    found["when"] = f"{when}; {cores} cores where the users ran{load_words}"
    return found | {"profile": options.profile, "shape": options.shape, "metrics_unread": trouble}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="mixed", help="what users do")
    parser.add_argument("--shape", choices=SHAPES, default="steady", help="how their number goes over time")
    parser.add_argument("--users", type=int, default=16, help="the most users")
    parser.add_argument("--seconds", type=int, default=60, help="how long")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds from an answer to the user's next request")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--model", default="millrace", help="the model's name in requests to /v1")
    parser.add_argument("--prompts", type=Path, help="JSONL file of {prompt, answer}; without it, prompts are drawn")
    parser.add_argument("--p95", type=float, default=2.0, help="limit on the 95th percentile of answers, in seconds")
    parser.add_argument("--first-token", type=float, default=1.0, help="the same, to the first token of streams")
    parser.add_argument("--errors", type=float, help="limit on the share of requests that fail; 0.001, of a soak 0")
    parser.add_argument(
        "--growth", type=float, default=0.02, help="limit on the growth of memory in a soak, as a share"
    )
    parser.add_argument("--hold", type=int, default=0, help="users that a ramp must show; 0: those that it begins with")
    parser.add_argument("--out", type=Path, default=Path("runs/loadtest"), help="where the page goes")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="settings of its own server"
    )
    options = parser.parse_args()
    if options.users < 1 or options.seconds < 1:
        parser.error("--users and --seconds are at least 1")
    if options.prompts and not options.prompts.is_file():
        parser.error(f"--prompts: there is no file {options.prompts}")
    return options


if __name__ == "__main__":
    main()
