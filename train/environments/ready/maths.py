"""Mathematics: an answer that is equal to the right one by symbols, as 1/2 is to \\frac{2}{4} and 0.5."""

from __future__ import annotations

import re
from typing import Final

from train.environments.ready.single_turn import SingleTurn
from train.environments.ready.verifier import verdict

_BOXED: Final = "\\boxed{"
_MARKED: Final = re.compile(r"(?:####|[Aa]nswer\s*(?:is|:)|=)\s*([^\n]+)")


class Maths(SingleTurn):
    """Reward 1 where a response's last answer is that of the prompt's metadata, else 0."""

    def __init__(self, answer: str = "answer", seconds: float = 5.0, system: str | None = None) -> None:
        """``answer``: key of the right one in metadata. ``seconds``: of a comparison; an answer over it is wrong."""
        super().__init__(system)
        self.key, self.seconds = answer, seconds

    async def verdict(self, text: str) -> float:
        right, found = self.metadata(self.key), last_answer(text)
        return float(found is not None and await verdict("maths", found, right, seconds=self.seconds))


def last_answer(text: str) -> str | None:
    """What stands in the last ``\\boxed{}``; else behind the last ``####``, ``answer is`` or ``=``; else the last line.

    None if there is nothing.
    """
    if (start := text.rfind(_BOXED)) >= 0:
        depth, begin = 1, start + len(_BOXED)
        for i in range(begin, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[begin:i].strip() or None
        return None
    if marked := _MARKED.findall(text):
        return str(marked[-1]).strip() or None
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None
