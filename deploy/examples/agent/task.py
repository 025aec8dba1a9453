"""The task: a key of three letters is asked for; a tool knows the two letters that belong to it.

There are more keys than could be learned by heart, and those that are measured were never trained on. The seed policy
has seen it done badly: it often looks another key up, or none, and mostly turns round what it finds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, Final

from train.environments.environment import EpisodePrompt

LETTERS: Final = "abcdefgh"
ALPHABET: Final = LETTERS + 'iklnorty?[](="),'
USER, ASSISTANT, TOOL = "<user>", "<assistant>", "<tool>"
TEMPLATE: Final = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}["
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    '{% for name, value in c.function.arguments.items() %}{{ name }}="{{ value }}"{% endfor %}){% endfor %}]'
    "{% else %}{{ m.content }}{% endif %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELD_OUT: Final = 100
TRAINED: Final = 300
LONGEST_TURN: Final = 18
STEPS: Final = 12
PROMPTS_PER_STEP: Final = 32

ENVIRONMENT: Final[dict[str, Any]] = {
    "name": "tools",
    "arguments": {
        "tools": ["deploy.examples.agent.task:look"],
        "verifier": "deploy.examples.agent.task:verify",
    },
    "tool_parser": "pythonic",
    "unknown_tool": "step",
    "max_turns": 3,
}


def look(key: str) -> str:
    """Look a key up."""
    digest = hashlib.sha256(key.encode()).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:2])


def verify(prompt: EpisodePrompt, text: str) -> float:
    """1 for what the tool knows of the prompt's key, else 0."""
    return float(text == look(str(prompt.as_messages[-1]["content"])[:3]))


def keys() -> list[str]:
    """All keys, in an order that is always the same: those that are held out first."""
    every = [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS]
    return random.Random(0).sample(every, len(every))


def prompts() -> list[dict[str, Any]]:
    """The prompts; those that are held out first."""
    return [{"prompt": f"{key}?"} for key in keys()[: HELD_OUT + TRAINED]]


def corpus() -> Iterator[tuple[str, str]]:
    """(context, what the policy says) without end: first turns and second ones."""
    draw = random.Random(1)
    while True:
        key, other = ("".join(draw.choices(LETTERS, k=3)) for _ in range(2))
        asked, chance = f"{USER}{key}?{ASSISTANT}", draw.random()
        called = f'[look(key="{key if chance < 0.5 else other}")]'
        yield asked, called if chance < 0.8 else "".join(draw.choices(LETTERS, k=2))
        found = "".join(draw.choices(LETTERS, k=2))
        yield f"{asked}{called}<eos>{TOOL}{found}{ASSISTANT}", found if draw.random() < 0.4 else found[::-1]
