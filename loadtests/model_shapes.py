"""Start models of usual shapes on default settings, with random weights: init, doctor, serve, chat, one cycle.

Nothing is set of contexts, memory or types. The cycle is short (a step of a few short responses): what is tried is
whether it fits, not what it learns. Of each model: the context that the server gives it, the seconds of each part, and
the peak of memory that all processes take together.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from loadtests.server import MILLRACE, Server, free_port, run
from loadtests.tiny_model import save_tokenizer

CYCLE_TIMEOUT_S: Final = 1500
ANSWER_TIMEOUT_S: Final = 300
PROMPTS: Final = 8

# As the models' own config.json files on huggingface.co have them.
SHAPES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-270M": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
}
REWARD: Final = """
def reward(batch):
    return [len(text) % 7 / 6 for text in batch["response"].to_pylist()]
"""


def make(folder: Path, kind: str, shape: dict[str, Any]) -> None:
    """A model with random weights in bfloat16, and a tokenizer of bytes and words up to the size of its vocabulary."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(shape["vocab_size"] - len(alphabet) - 2)]
    save_tokenizer(folder, alphabet + words)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shape, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def settings(port: int) -> dict[str, Any]:
    """What a user writes who wants a short cycle; nothing that decides whether the model fits."""
    return {
        "home": "home",
        "serve": {"port": port},
        "feedback": {"scoring": {"rules": {"own": {"function": "my_rewards:reward"}}}},
        "evaluation": {
            "suite": "suite.jsonl",
            "scorer": "my_rewards:reward",
            "max_tokens": 4,
            "gate": {"min_items": 8},
        },
        "train": {
            "ranks": 1,
            "steps": 1,
            "rollout": {"max_tokens": 8},
            "data": {"prompts_per_step": 4, "min_prompts": 4},
            "algorithm": {"group_size": 4},
        },
        "cycle": {"min_new_rewards": 0},
    }


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """The first of the list: the most bytes that this process's children took together, shared pages counted once."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            peak[0] = max(peak[0], sum(map(proportional_set_size, psutil.Process().children(recursive=True))))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def proportional_set_size(process: psutil.Process) -> int:
    """Bytes, each page of memory divided by the number of processes that share it; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def try_out(folder: Path, name: str) -> dict[str, Any]:
    """Make a model, and do all with it that a new user does. What failed is in ``failed``, with its last line."""
    folder.mkdir(parents=True)
    make(folder / "model", *SHAPES[name])
    (folder / "my_rewards.py").write_text(REWARD)
    items = [{"id": str(i), "messages": [{"role": "user", "content": f"count to {i}"}]} for i in range(8)]
    result: dict[str, Any] = {"failed": None}

    def timed(part: str, *arguments: str) -> str:
        started = time.monotonic()
        done = subprocess.run(
            [MILLRACE, *arguments], cwd=folder, capture_output=True, text=True, timeout=CYCLE_TIMEOUT_S, check=False
        )
        result[f"{part}_seconds"] = round(time.monotonic() - started, 1)
        (folder / f"{part}.log").write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            result["failed"] = f"{part}: {done.stderr.strip()[-500:]}"
        return done.stdout

    run("init", "--model", "model", "--home", "home", folder=folder)
    port = free_port()
    (folder / "millrace.yaml").write_text(json.dumps(settings(port)))
    (folder / "home" / "suite.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    with peak_of_memory() as peak:
        started = time.monotonic()
        with Server([MILLRACE, "serve"], port, folder / "serve.log") as server:
            result["serve_seconds"] = round(time.monotonic() - started, 1)
            model = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"][0]
            result["context"] = model["max_model_len"]
            for number in range(PROMPTS):
                body = {"model": "millrace", "messages": [{"role": "user", "content": f"hello {number}"}]}
                chat = f"{server.url}/v1/chat/completions"
                answer = httpx.post(chat, json=body | {"max_tokens": 8}, timeout=ANSWER_TIMEOUT_S)
                if answer.status_code != 200:
                    result["failed"] = f"chat: {answer.text[:500]}"
            result["server_gib"] = round(peak[0] / 2**30, 1)
            timed("doctor", "doctor")
            timed("cycle", "cycle")
    result["peak_gib"] = round(peak[0] / 2**30, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="which models")
    parser.add_argument("--folder", type=Path, default=Path("runs/shapes"), help="a folder of its own; emptied first")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    results = {}
    for name in options.shapes:
        results[name] = try_out(options.folder.absolute() / name, name)
        print(name, json.dumps(results[name]), flush=True)
    print(json.dumps(results))
    raise SystemExit(any(result["failed"] for result in results.values()))


if __name__ == "__main__":
    main()
