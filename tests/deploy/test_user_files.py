"""Millrace in a folder whose files have the names of its packages: it imports none of them, and the user's own code.

From the checkout, and from a wheel in an environment that has no checkout.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.examples.demo.task import items
from tests.paths import ROOT
from tests.train.job_home import make_home

NAMES = ("train.py", "serve.py", "evaluation.py", "deploy.py", "signal.py", "statistics.py", "feedback/__init__.py")
SETTINGS = {
    "feedback": {"scoring": {"rules": {"own": {"function": "my_rewards:reward"}}}},
    "evaluation": {
        "scorer": "my_rewards:reward",
        "max_tokens": 4,
        "engine": {"max_model_len": 64, "kv_cache_bytes": 16 << 20, "dtype": "float32"},
    },
    "serve": {"engine": {"dtype": "float32"}},
    "train": {
        "ranks": 1,
        "dtype": "float32",
        "steps": 1,
        "micro_batch_tokens": 64,
        "hooks": ["my_rewards:Note"],
        "rollout": {"max_tokens": 6, "max_model_len": 64, "kv_cache_bytes": 16 << 20},
        "data": {"prompts_per_step": 4, "min_prompts": 4},
        "algorithm": {"group_size": 4},
    },
    "cycle": {"min_new_rewards": 0},
}
MY_REWARDS = """
from train.observe.hooks import Hook

def reward(batch):
    return [len(text) / 10 for text in batch["response"].to_pylist()]

class Note(Hook):
    def on_start(self):
        (self.run.folder / "noted").touch()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder; also its ``home`` with prompts to train from, and a suite."""
    home = tmp_path / "home"
    home.mkdir()
    make_home(home)
    suite = [
        {"id": str(i), "prompt": x.prompt, "answer": x.answer} for i, x in enumerate(itertools.islice(items(2), 60))
    ]
    (home / "suite.jsonl").write_text("".join(json.dumps(item) + "\n" for item in suite))
    (tmp_path / "millrace.yaml").write_text(json.dumps(SETTINGS))
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError(f'the user file {__file__} was imported')\n")
    return tmp_path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("feedback", "serve", "evaluation", "train", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True, timeout=300)
    return next(out.glob("millrace-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment: the wheel, and what Millrace depends on, without the editable install."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=120)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{next(path for path in sys.path if path.endswith('site-packages'))}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--force-reinstall", str(wheel)], check=True, timeout=300)
    return venv / "bin" / "millrace"


def run(millrace: Path, folder: Path, *arguments: str, timeout: float = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [millrace, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )
    printed = done.stdout + done.stderr
    assert "was imported" not in printed, printed
    assert done.returncode == 0, printed
    return printed


def check(millrace: Path, folder: Path) -> None:
    """The first commands of a newcomer, and a cycle that scores, trains and judges by the user's functions."""
    run(millrace, folder, "--help")
    run(millrace, folder, "init", "--model", str(folder / "home" / "seed"), "--home", "other", "--no-write-config")
    assert "reward, held-out suite and schedule can be used" in run(millrace, folder, "doctor")
    assert "own:" in run(millrace, folder, "score")
    printed = run(millrace, folder, "cycle", "--train.launcher", "ray", timeout=900)
    record = json.loads((folder / "home" / "cycles" / "000001.json").read_text())
    assert record["status"] in ("promoted", "refused", "undecided"), printed
    assert (folder / "home" / "runs" / "cycle-000001" / "noted").exists()


def test_a_checkout_imports_its_own_packages_and_the_users_functions(
    folder: Path, nothing_left: Callable[[], list[str]]
) -> None:
    millrace = Path(sys.executable).with_name("millrace")
    check(millrace, folder)
    run(millrace, folder, "train", "--run", "other-launcher", "--train.launcher", "torchrun", timeout=900)
    assert (folder / "home" / "runs" / "other-launcher" / "noted").exists()


@pytest.mark.long
def test_so_does_a_wheel_where_there_is_no_checkout(
    installed: Path, folder: Path, nothing_left: Callable[[], list[str]]
) -> None:
    found = [str(installed.with_name("python")), "-P", "-c", "import train; print(train.__file__)"]
    where = subprocess.run(found, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(installed.parents[1]))
    check(installed, folder)


def test_a_wheel_has_the_files_that_are_not_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    assert "evaluation/report/templates/report.html.jinja" in files
    kept = subprocess.run(["git", "ls-files", "*/static/*"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(kept.stdout.split()) <= files.keys()
    assert files["serve/vllm/tied_python"] & 0o111, "multiprocessing runs it"
    assert not [name for name in files if name.startswith(("tests/", "loadtests/"))]
