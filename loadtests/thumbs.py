"""A person with a chat model and nothing but thumbs: `millrace up MODEL`, and then HTTP alone.

Makes a tiny chat model that greets people, politely in two answers of five. Starts it with one command in an empty
folder; no suite, no rule, no judge, no Python. The person greets it again and again, gives a thumb up to what is
polite, is wrong one time in ten, and goes on until as many candidates have a final verdict as asked. The options are
there because the model is tiny (it needs larger steps than the defaults', and gives short answers), and because nobody
wants to wait an hour for a cycle.

What a person would see is in ``transcript.txt`` of the folder; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from loadtests.server import MILLRACE, Server, free_port

POLITE, CURT = "hello ", "yo "
POLITE_SHARE: Final = 0.4
WRONG_SHARE: Final = 0.1
LONGEST_S: Final = 3600.0
POLL_S: Final = 20.0
PACE_S: Final = 0.3
ANSWERS_COMPARED: Final = 50
OPTIONS: Final = {
    "schedule.interval_seconds": "20",
    "schedule.first_after_seconds": "60",
    "cycle.min_new_rewards": "100",
    "train.launcher": "torchrun",
    "train.dtype": "float32",
    "train.steps": "10",
    "train.algorithm.name": "dr_grpo",
    "train.optimizer.learning_rate": "3e-4",
    "train.rollout.max_tokens": "16",
    "train.reward_model.learning_rate": "5e-4",
    "evaluation.max_tokens": "16",
    "feedback.lake.seal_seconds": "1",
}


def make_model(folder: Path, *, steps: int = 200, batch: int = 64) -> None:
    """A small Qwen3, a token a character, trained from scratch on greetings of both kinds."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<pad>", "<eos>", "<user>", "<assistant>"]
    words = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*special, *string.ascii_lowercase, " "])}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>",
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=32,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    order, people = random.Random(1), names(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * max(0.05, 0.5 * (1 + math.cos(math.pi * step / steps)))
        rows = [
            (tokenizer.encode(f"<user>i am {name}<assistant>"), tokenizer.encode(greeting(name, order) + "<eos>"))
            for name in itertools.islice(people, batch)
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.zeros(batch, width, dtype=torch.long)
        labels = torch.full((batch, width), -100)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"made {folder}: loss {loss:.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def names(seed: int) -> Iterator[str]:
    """Different names without end."""
    order, known = random.Random(seed), set[str]()
    while True:
        name = "".join(order.choices(string.ascii_lowercase, k=order.randint(3, 5)))
        if name not in known:
            known.add(name)
            yield name


def greeting(name: str, order: random.Random) -> str:
    return (POLITE if order.random() < POLITE_SHARE else CURT) + name


class Person:
    """Greets the server by new names, and gives thumbs, until stopped. A context manager."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.order, self.people = random.Random(2), names(2)
        self.thumbs = 0
        self._stop, self._failed = threading.Event(), list[str]()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def answer(self, name: str, **sampling: Any) -> dict[str, Any]:
        """The answer of the chat API to somebody of that name."""
        messages = [{"role": "user", "content": f"i am {name}"}]
        body = {"model": "millrace", "messages": messages, "max_tokens": 16, **sampling}
        answer = self.http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return dict(answer.json())

    def polite_share(self) -> float:
        """The share of polite answers, sampled, to names that were never asked before; no thumbs, and not stored."""
        asked = list(itertools.islice(names(3), ANSWERS_COMPARED))
        return sum(likes(self.answer(name, store=False)) for name in asked) / len(asked)

    def _go_on(self) -> None:
        try:
            while not self._stop.wait(PACE_S):
                name = next(self.people)
                answer = self.answer(name)
                meant = likes(answer) != (self.order.random() < WRONG_SHARE)
                thumb = {"response_id": answer["id"], "kind": "thumb", "value": int(meant)}
                self.http.post("/feedback", json=thumb).raise_for_status()
                self.thumbs += 1
        except httpx.HTTPError as error:
            self._failed.append(str(error))

    def check(self) -> None:
        if self._failed:
            raise SystemExit(f"a request failed: {self._failed[0]}")

    def __enter__(self) -> Person:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


def likes(answer: dict[str, Any]) -> bool:
    """The person's taste."""
    return str(answer["choices"][0]["message"]["content"]).startswith(POLITE)


class Transcript:
    """What was typed and printed, on the terminal and in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "transcript.txt"

    def write(self, text: str) -> None:
        print(text, flush=True)
        with self.file.open("a") as file:
            file.write(text + "\n")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [MILLRACE, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )
        self.write(f"$ millrace {' '.join(arguments)}\n{done.stdout}{done.stderr}".rstrip() + "\n")
        return done.stdout


def judged(folder: Path) -> list[dict[str, Any]]:
    """The cycles that have come to a final verdict, newest first. Raises SystemExit if one failed."""
    done = subprocess.run(
        [MILLRACE, "status", "--json"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    cycles = json.loads(done.stdout)["cycles"]
    if failed := next((cycle for cycle in cycles if cycle["status"] == "failed"), None):
        raise SystemExit(f"cycle {failed['number']} failed: {failed['reason']}")
    return [cycle for cycle in cycles if cycle["status"] in ("promoted", "refused")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/thumbs"), help="a folder of its own; emptied first")
    parser.add_argument("--cycles", type=int, default=2, help="cycles that come to a final verdict")
    parser.add_argument("--model", type=Path, help="a model that an earlier run made, to begin with")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="more settings")
    options = parser.parse_args()
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if options.model:
        shutil.copytree(options.model, folder / "model")
    else:
        make_model(folder / "model")
    transcript, port = Transcript(folder), free_port()
    settings = OPTIONS | {"serve.port": str(port)} | dict(each.split("=", 1) for each in options.option)
    command = ["up", "./model", *itertools.chain(*((f"--{name}", value) for name, value in settings.items()))]
    transcript.write(f"$ millrace {' '.join(command)}\n")
    started, shares = time.monotonic(), []
    with Server([MILLRACE, *command], port, folder / "up.log") as server, Person(server.url) as person:
        shares.append(person.polite_share())
        while len(cycles := judged(folder)) < options.cycles:
            person.check()
            if server.process.poll() is not None or time.monotonic() - started > LONGEST_S:
                raise SystemExit(f"it ended, or took longer than {LONGEST_S:.0f} s; see {folder / 'up.log'}")
            time.sleep(POLL_S)
        shares.append(person.polite_share())
        transcript.run("status", "--serve.port", str(port))
        thumbs = person.thumbs
    transcript.run("policies")
    transcript.run("history")
    result = {
        "cycles": [{name: cycle[name] for name in ("number", "status", "recipe")} for cycle in reversed(cycles)],
        "promoted": sum(cycle["status"] == "promoted" for cycle in cycles),
        "thumbs": thumbs,
        "polite": {"before": shares[0], "after": shares[1], "answers": ANSWERS_COMPARED},
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(result))
    sys.exit(0 if result["promoted"] else 1)


if __name__ == "__main__":
    main()
