"""Which prompts a run draws next, by how often it has solved them lately.

The prompts come in the order in which they come without: each step walks on in it, and passes over prompts that rest,
and others by chance. How likely a prompt is taken is in proportion to the expected variance p (1 - p) of whether a
response solves it, which is what comparing its responses can teach (Foster and Foerster, "Learning to Reason at the
Frontier of Learnability", arXiv 2502.12272, section 3). All of it follows from the seed and from what was counted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from feedback.datasets import Prompt
from train.config.sections import CurriculumConfig
from train.data.pass_rates import key
from train.data.prompts import Cycled, Mixed


class Curriculum:
    """The prompts of a run's steps. ``seed``: of what is passed over by chance."""

    def __init__(self, config: CurriculumConfig, prompts: Cycled | Mixed, seed: int) -> None:
        self.config, self.prompts, self.seed = config, prompts, seed
        self.known = {key(prompt.prompt_token_ids) for prompt in prompts.items}
        self.position = 0
        """In the order without a curriculum: of the next prompt that is looked at."""
        self.drawn: dict[str, list[int]] = {}
        """By step and round, the positions of what was drawn and is not counted yet."""
        self.results: dict[str, str] = {}
        """By a prompt's key, of its last responses, the oldest first: 1 for one that has solved it, else 0."""
        self.rests_until: dict[str, int] = {}
        """By key, the first step in which it may be drawn again."""
        self._looked_at: tuple[int, list[Prompt]] = -1, []

    def at(self, step: int, again: int = 0) -> list[Prompt]:
        """The prompts of a round of a step: drawn when it is first asked for, then the same until it is counted."""
        name = f"{step}.{again}"
        if name not in self.drawn:
            self.drawn[name] = self._draw(step)
        return [self._prompt(position) for position in self.drawn[name]]

    def count(self, step: int, again: int, solved: Mapping[int, Sequence[bool]]) -> None:
        """Count the responses to the prompts of a round, which is over then.

        Args:
            solved: by the number of a prompt in the round, whether each of its responses has solved it.
        """
        c = self.config
        for number, position in enumerate(self.drawn.pop(f"{step}.{again}")):
            name = key(self._prompt(position).prompt_token_ids)
            new = "".join("01"[bool(of)] for of in solved.get(number, ()))
            self.results[name] = (self.results.get(name, "") + new)[-c.window :]
            if self._is_out(self.results[name]):
                self.rests_until[name] = step + 1 + c.rest_steps
            else:
                self.rests_until.pop(name, None)

    def metrics(self, step: int) -> dict[str, float]:
        """Of all prompts: the share that was counted and the mean of its pass rates, and how many rest."""
        rates = [of.count("1") / len(of) for of in self.results.values() if of]
        return {
            "curriculum/counted": len(rates) / len(self.known),
            "curriculum/resting": float(sum(step < until for until in self.rests_until.values())),
            **({"curriculum/pass_rate": sum(rates) / len(rates)} if rates else {}),
        }

    def state(self) -> dict[str, Any]:
        """What ``resume`` takes: JSON."""
        return {
            "position": self.position,
            "drawn": dict(self.drawn),
            "results": dict(self.results),
            "rests_until": dict(self.rests_until),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.position = state["position"]
        self.drawn, self.results = dict(state["drawn"]), dict(state["results"])
        self.rests_until = dict(state["rests_until"])

    # ------------------------------------------------------------------------------------------------------ drawing

    def _draw(self, step: int) -> list[int]:
        """Positions of as many prompts as a step has, none twice.

        Where too few are left in twice as many looks as there are prompts, the first that were passed over are taken,
        those that rest last, and then again from the beginning.
        """
        count, taken, passed, resting = self.prompts.count, dict[str, int](), dict[str, int](), dict[str, int]()
        items = len(self.prompts.items)
        for _ in range(max(count, 2 * items) if items else 0):
            if len(taken) == count:
                break
            position, self.position = self.position, self.position + 1
            name = key(self._prompt(position).prompt_token_ids)
            if name in taken:
                continue
            if step < self.rests_until.get(name, 0):
                resting.setdefault(name, position)
            elif random.Random(f"{self.seed}:curriculum:{position}").random() < self._share(name):
                taken[name] = position
            else:
                passed.setdefault(name, position)
        for more in (passed, resting):
            taken |= {name: more[name] for name in [n for n in more if n not in taken][: count - len(taken)]}
        found = list(taken.values())
        return [found[i % len(found)] for i in range(count)] if found else []

    def _share(self, name: str) -> float:
        """How often a prompt is taken when it is looked at: 4 E[p (1 - p)], p as its results leave it from even odds.

        Of s solved and f others p is Beta(1 + s, 1 + f), and E[p (1 - p)] = a b / ((a + b) (a + b + 1)).
        """
        if self.config.prefer == "all":
            return 1.0
        results = self.results.get(name, "")
        a, b = 1 + results.count("1"), 1 + results.count("0")
        return 4 * a * b / ((a + b) * (a + b + 1))

    def _is_out(self, results: str) -> bool:
        c, solved = self.config, results.count("1")
        if len(results) < c.min_responses:
            return False
        too_seldom = c.low is not None and solved <= c.low * len(results)
        return too_seldom or (c.high is not None and solved >= c.high * len(results))

    def _prompt(self, position: int) -> Prompt:
        """That at a position of the order without a curriculum."""
        step, number = divmod(position, self.prompts.count)
        if self._looked_at[0] != step:
            self._looked_at = step, self.prompts.at(step)
        return self._looked_at[1][number]
