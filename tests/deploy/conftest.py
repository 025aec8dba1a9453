"""A tiny real Qwen3 with its own tokenizer, homes that hold it, and a look at what processes are left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy import initialise
from deploy.config import root
from deploy.config.root import Settings
from deploy.config.sources import ENV_PREFIX
from feedback.files import locked
from loadtests.server import free_port


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in an empty folder, without the settings of the user who runs it."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random weights, one token a character."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    characters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 +=?"]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(characters)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=128
    )
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(characters),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A home without a policy, with what a cycle needs beside one, and a free port."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "suite.jsonl").write_text(
        "".join(f'{{"id": "{i}", "prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(60))
    )
    return root.load(
        None,
        [
            ("home", str(home)),
            ("serve.port", str(free_port())),
            ("feedback.scoring.rules.exact.ready", "exact_match"),
            ("train.rollout.max_tokens", "32"),
            ("cycle.stop_grace_s", "2"),
            ("feedback.lake.lock_timeout_s", "600"),
        ],
    )


@pytest.fixture
def home_with_policy(settings: Settings, model: Path) -> Settings:
    initialise.initialise(settings, str(model), revision=None, who="tests")
    return settings


@contextmanager
def scoring_waits(settings: Settings) -> Iterator[None]:
    """A cycle that begins in the block stays in its first stage, which waits to seal the journal."""
    journal = Path(settings.resolved().feedback.journal.folder)
    journal.mkdir(parents=True, exist_ok=True)
    with locked(journal / ".seal.lock", 60):
        yield


@pytest.fixture
def nothing_left() -> Iterator[Callable[[], list[str]]]:
    """Call it to see which processes, started since, still run; none may at the end of the test.

    The fork server of all tests (tests/conftest.py) may: it starts with whoever asks first, and again after a rest. So
    may multiprocessing's resource tracker, for the moment until it sees that its process has ended.
    """
    before = {process.pid for process in psutil.process_iter()}
    mark = f"millrace-test-{os.getpid()}-{time.monotonic_ns()}"
    os.environ["MILLRACE_TEST_MARK"] = mark

    def left(*, trackers: bool = False) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid not in before and process.status() != psutil.STATUS_ZOMBIE:
                    marked = process.environ().get("MILLRACE_TEST_MARK") == mark
                    command = " ".join(process.cmdline())
                    of_the_tests = process.ppid() == os.getpid() and "deploy.supervise.preloaded" in command
                    tracks = "multiprocessing.resource_tracker" in command
                    if marked and not of_the_tests and (trackers or not tracks):
                        found.append(f"{process.pid} {command[:150]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    yield left
    deadline = time.monotonic() + 120
    while left(trackers=True) and time.monotonic() < deadline:
        time.sleep(0.1)
    del os.environ["MILLRACE_TEST_MARK"]
    assert left(trackers=True) == []
