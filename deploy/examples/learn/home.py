"""What the trials share: the seed policy in a policy store, a held-out suite, and a lake with what users did.

It is prepared once and kept in the work folder, until the code that makes it changes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from deploy.examples.learn import task, traffic
from deploy.supervise.children import Child
from evaluation.config import EngineConfig, EvaluationConfig, GateConfig
from serve.policies.store import Policy, PolicyStore

REWARD: Final = "deploy.examples.learn.task:reward"
MAX_TOKENS: Final = 8
MAX_MODEL_LEN: Final = 32
KV_CACHE_BYTES: Final = 32 * 2**20
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""For children: a model this small is computed faster by one thread."""
_LONGEST_S: Final = 600.0

Say = Callable[[str], None]


class LearnError(RuntimeError):
    """The measurement can't be made; the text says why."""


class Home:
    """The folders of all trials. ``work`` is emptied at each start, the others are kept.

    ``evaluations`` keeps answers by a policy's content, so that none is generated twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seed, self.lake, self.suite = folder / "seed", folder / "lake", folder / "heldout.jsonl"
        self.evaluations, self.work = folder / "evaluations", folder / "work"
        self.store = PolicyStore(self.work / "policies")
        self.reward_models = PolicyStore(self.work / "reward_models")

    def first(self) -> Policy:
        """The seed policy."""
        return self.store.get(1)


def prepare(folder: Path, say: Say) -> Home:
    """The home in ``folder``: what is there of it, if the same code prepared it, else prepared anew."""
    home, mark = Home(folder.resolve()), folder / "made-by"
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        raise LearnError(
            f"{folder} holds something that is not of deploy.examples.learn; name another folder (--folder)"
        )
    if not mark.exists() or mark.read_text() != digest():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mark.write_text("")  # a start that is cut short begins again
        make(home, say)
        mark.write_text(digest())
    shutil.rmtree(home.work, ignore_errors=True)
    publish_seed(home)
    return home


def make(home: Home, say: Say) -> None:
    make_seed(home, say)
    policy = publish_seed(home)
    rows = [{"id": str(i), "prompt": item.prompt, "answer": item.answer} for i, item in enumerate(task.held_out())]
    home.suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    say(f"seed policy: {traffic.log(home.lake, policy, engine_config(), reward=REWARD, max_tokens=MAX_TOKENS)}")


def make_seed(home: Home, say: Say) -> None:
    command = [sys.executable, "-P", "-m", "deploy.examples.learn.seed", str(home.seed)]
    child = Child("seed", command, log=home.folder / "seed.log", environment=ONE_THREAD, grace=5.0, follow=say)
    if code := child.finish(_LONGEST_S):
        raise LearnError(f"the seed policy could not be trained: {child.ended(code)}")


def publish_seed(home: Home) -> Policy:
    """Policy 1 of the store, which serves."""
    policy = home.store.publish(home.seed, parent=None, lineage={}, metrics={})
    home.store.promote(policy.version, expected=None, who="deploy.examples.learn", why="the seed")
    return policy


def engine_config() -> EngineConfig:
    return EngineConfig(dtype="float32", max_model_len=MAX_MODEL_LEN, kv_cache_bytes=KV_CACHE_BYTES)


def evaluation_config() -> EvaluationConfig:
    return EvaluationConfig(
        scorer=REWARD,
        max_tokens=MAX_TOKENS,
        kl_samples=0,
        engine=engine_config(),
        gate=GateConfig(metric="accuracy", confidence=0.95),
    )


def digest() -> str:
    """Hash of the code that makes a home."""
    here = Path(__file__).parent
    sources = [
        *(here.with_name("demo") / name for name in ("seed.py", "task.py")),
        *(here / f"{name}.py" for name in ("home", "seed", "task", "traffic")),
    ]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
