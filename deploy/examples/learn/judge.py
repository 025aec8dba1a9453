"""A judge at an OpenAI-compatible endpoint, for trials whose reward is its word: a small model that Millrace serves.

It is a causal language model that was trained here to say what is right and then 1 or 0 of an answer. To the trial it
is a black box: questions go to it by HTTP, as to any judge, and it errs as judges do.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from deploy import initialise
from deploy.config.root import Settings
from deploy.examples.demo.run import free_port
from deploy.examples.learn import task
from deploy.examples.learn.home import KV_CACHE_BYTES, MAX_MODEL_LEN, ONE_THREAD, Home, LearnError, Say
from deploy.loop.wait_for_serving import server_policy
from deploy.supervise.children import Child, start
from feedback.config import JudgeConfig, ScoringConfig
from feedback.scoring.sources.judge import Judge

ASKED: Final[dict[str, Any]] = {
    **{"model": "millrace", "rubric": f"{{prompt}}{{response}}{task.ASK}", "high": 1},
    **{"max_tokens": 4, "concurrency": 32, "extra": {"response_format": None}},
}
"""How it is asked. It answers in one form, whatever is requested."""

_LONGEST_S: Final = 900.0


@contextmanager
def reward_by(sources: dict[str, Any], home: Home, cache: Path, say: Say) -> Generator[ScoringConfig]:
    """The reward of a recipe, whose judge is there meanwhile. ``sources``: those beside it; or a weight of it.

    Verdicts are kept in ``cache``. Raises LearnError if the judge can't be had.
    """
    with served(home, model(home, say), say) as url:
        config = JudgeConfig.model_validate({"url": url, "cache": str(cache), **ASKED, **sources.get("judge", {})})
        say(f"judge: {agreement(config):.1%} of answers to held-out prompts judged as the rule does")
        yield ScoringConfig.model_validate({**sources, "judge": config})


def model(home: Home, say: Say) -> Path:
    """The judge's folder; it is trained when it is not there yet."""
    folder, aside = home.folder / "judge", home.folder / "judge-new"
    if not folder.exists():
        command = [sys.executable, "-P", "-m", "deploy.examples.learn.seed", str(aside), "--judge"]
        child = Child("judge", command, log=home.folder / "judge.log", environment=ONE_THREAD, grace=5.0, follow=say)
        if code := child.finish(_LONGEST_S):
            raise LearnError(f"the judge could not be trained: {child.ended(code)}")
        aside.rename(folder)
    return folder


@contextmanager
def served(home: Home, folder: Path, say: Say) -> Generator[str]:
    """Serve a model on this machine, by ``millrace serve``; its address."""
    engine = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": KV_CACHE_BYTES, "threads": 1}
    settings = Settings.model_validate(
        {"home": home.work / "judge", "serve": {"port": free_port(), "engine": {**engine, "log_level": "ERROR"}}}
    )
    if settings.policy_store().serving() is None:
        initialise.initialise(settings, str(folder), revision=None, who="deploy.examples.learn")
    with start(settings, "judge", ["serve"], log="serve.log", grace=30.0, follow=lambda line: None) as child:
        deadline = time.monotonic() + _LONGEST_S
        while server_policy(settings) is None:
            if (code := child.poll()) is not None:
                raise LearnError(child.ended(code))
            if time.monotonic() > deadline:
                raise LearnError(f"the judge was not served within {_LONGEST_S:g} s (log: {child.log})")
            time.sleep(0.25)
        say(f"judge: served at {settings.server_url}")
        yield f"{settings.server_url}/v1"


def agreement(config: JudgeConfig) -> float:
    """The share of right and wrong answers to held-out prompts of which the judge says what the rule says."""
    rng, items = random.Random(task.TASK_SEED), task.held_out()[:100]
    answers = [answer for item in items for answer in (item.answer, task.wrong(item, rng))]
    rows = pa.table(
        {
            "prompt": [item.prompt for item in items for _ in range(2)],
            "messages": pa.nulls(len(answers), pa.string()),
            "response": answers,
            "metadata": pa.nulls(len(answers), pa.map_(pa.string(), pa.string())),
        }
    )
    values, reasons = Judge(config, once=True).by_row(rows)
    if missing := [reason for reason in reasons if reason is not None]:
        raise LearnError(f"the judge has no verdict on {len(missing)} of {len(values)} answers: {missing[0]}")
    pairs = zip(values, task.reward(rows), strict=True)
    return sum(value is not None and (value > 0.5) == (truth > 0.5) for value, truth in pairs) / len(values)
