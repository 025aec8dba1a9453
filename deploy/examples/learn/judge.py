"""A judge at an OpenAI-compatible endpoint, for the trials whose reward is a judge's word: it knows the task's rule.

What a trial shows is that a policy learns from verdicts that come over HTTP as any judge's do. How good a judge a
language model is, it does not show.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from deploy.examples.learn.task import reward
from feedback.config import ScoringConfig

_BEGIN, _MIDDLE, _END = "Prompt: ", "\nAnswer: ", "\nIs the answer right?"
BEST: Final = 10


class Judge(BaseHTTPRequestHandler):
    """Answers chat completions with a score of 0 or ``BEST``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        prompt, _, rest = question.removeprefix(_BEGIN).partition(_MIDDLE)
        [value] = reward(pa.table({"prompt": [prompt], "response": [rest.rpartition(_END)[0]]}))
        message = {"role": "assistant", "content": json.dumps({"score": BEST * value})}
        body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def judge(cache: Path) -> Generator[dict[str, Any]]:
    """Serve a judge on this machine; the settings of a source that asks it, with verdicts in ``cache``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, name="judge", daemon=True).start()
    try:
        yield {
            "url": f"http://127.0.0.1:{server.server_address[1]}/v1",
            "model": "rule",
            "rubric": f"{_BEGIN}{{prompt}}{_MIDDLE}{{response}}{_END}",
            "high": BEST,
            "cache": str(cache),
        }
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def reward_by(sources: dict[str, Any], cache: Path) -> Generator[ScoringConfig]:
    """The reward of a recipe, whose judge is there meanwhile. ``sources``: those beside it; or a weight of it."""
    with judge(cache) as settings:
        yield ScoringConfig.model_validate({**sources, "judge": {**settings, **sources.get("judge", {})}})
