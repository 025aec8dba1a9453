"""Each figure on the page of a 70B model on 64 A100 is what its formula and the planner say.

A figure in a table reads ``value unit<br>`formula` ``. Formulas use the page's symbols, whose values are the planner's,
and what stands in its block of formulas.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from tests.paths import ROOT
from train.config.training import TrainConfig
from train.planner.machine import Machine, parse_gpus
from train.planner.model_shape import models_of, read_config
from train.planner.plan import GRAPHS, Models, Plan, Workload, choose, micro_batches, plan
from train.planner.sizes import GIB

PAGE = (ROOT / "docs/guide/plan-70b.md").read_text()
SETTINGS = {"rollout": {"max_tokens": 1024}, "data": {"prompts_per_step": 128}}
PROMPT_TOKENS = 1024
UNITS = {"s": 1, "GiB": GIB, "%": 0.01, "tokens/s": 1}
FIGURE = re.compile(r"([\d.,]+) (s|GiB|%|tokens/s)<br>`([^`]+)`")
SYMBOL = re.compile(r"^\| `(\w+)` \| ([^|]+) \|", re.M)


def block(opening: str) -> str:
    """The first block of code on the page that begins so."""
    found = re.search(rf"^```\w*\n({re.escape(opening)}.*?)^```$", PAGE, re.M | re.S)
    assert found is not None, opening
    return found[1]


@dataclass(frozen=True)
class Planned:
    """What the planner says to the page's command."""

    file: Path
    models: Models
    machine: Machine
    work: Workload
    plan: Plan

    def symbols(self) -> dict[str, Any]:
        """The values of the page's symbols."""
        shape, machine, config, work = self.models.policy.shape, self.machine, self.plan.config, self.work
        count, batch, full = micro_batches(work, config.data_parallel_ranks, config.micro_batch_tokens)
        assert (count, batch) == (1, full), "the page's formulas are of one micro-batch"
        traced, t = self.models.policy.trace(batch), config.rollout.tensor_parallel_size
        return {
            "P": shape.parameters,
            "E": shape.kinds["output"],
            "layer": shape.largest_layer.parameters,
            "root": shape.root.parameters,
            "L": len(shape.layers),
            "H": shape.hidden,
            "A": shape.heads * shape.head_size,
            "V": shape.vocabulary,
            "kv": shape.key_value_bytes(2, t),
            "N": machine.devices,
            "t": t,
            "p": work.prompt_tokens,
            "r": work.response_tokens,
            "n": work.prompts * work.group_size,
            "g": work.group_size,
            "S": work.prompts * work.group_size * t // machine.devices,
            "rows": batch.rows,
            "scored": batch.scored,
            "pairs": int(batch.pairs),
            "Q": machine.flops,
            "C": machine.matrix_flops(2),
            "B": machine.bandwidth * machine.bandwidth_share,
            "W": machine.slowest_link(t),
            "I": machine.slowest_link(machine.devices),
            "start": machine.graph_layer_s,
            "usable": machine.usable,
            "graphs": GRAPHS,
            "bucket": config.rollout.reshard_bucket_bytes,
            "keep_input": traced.layer_input,
            "keep_outside": traced.outside,
            "keep_layer": traced.layer,
            "keep_backward": traced.backward,
            "keep_inference": traced.inference,
        }

    def names(self) -> dict[str, Any]:
        """What a formula may use: symbols, and what stands in the page's block of formulas."""
        names = {"max": max, **self.symbols()}
        for line in block("M = ").splitlines():
            name, arguments, formula = re.fullmatch(r"(\w+)(?:\(([\w, ]+)\))? = (.+)", line).groups()  # type: ignore[union-attr]
            names[name] = eval(f"lambda {arguments}: {formula}" if arguments else formula, names)
        return names


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    file = tmp_path_factory.mktemp("llama") / "config.json"
    file.write_text(block('{\n  "model_type"'))
    config, machine = TrainConfig.model_validate(SETTINGS), parse_gpus("64xA100")
    work = Workload.of(config, PROMPT_TOKENS)
    models = models_of(read_config(file), config, machine.kind)
    return Planned(file, models, machine, work, choose(config, models, machine, work))


def symbol_text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def figure_text(value: float, like: str, unit: str) -> str:
    """With as many decimals as the page's."""
    return f"{value / UNITS[unit]:,.{len(like.partition('.')[2])}f}"


def cells() -> list[tuple[str, list[str]]]:
    """(first cell, the others) of each line of a table, without those of symbols."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not SYMBOL.match(line)]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [(first, others) for first, *others in rows if not set("".join(others)) <= {"-"}]


def test_the_page_shows_what_the_command_prints(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, shown = block("$ millrace plan ").partition("\n")
    arguments = command.removeprefix("$ millrace ").split()
    home = ["--home", str(planned.file.parent / "home")]
    assert cli.run([str(planned.file) if word == "config.json" else word for word in arguments] + home) == 0
    strip = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown.splitlines() == strip


def test_each_symbol_has_the_planners_value(planned: Planned) -> None:
    shown = {name: value.strip() for name, value in SYMBOL.findall(PAGE)}
    assert shown == {name: symbol_text(value) for name, value in planned.symbols().items()}


def test_each_figure_is_what_its_formula_says(planned: Planned) -> None:
    names, found = planned.names(), FIGURE.findall(PAGE)
    assert len(found) > 30
    wrong = {
        formula: (value, right)
        for value, unit, formula in found
        if (right := figure_text(eval(formula, names), value, unit)) != value
    }
    assert not wrong


def test_no_figure_in_a_table_is_without_a_formula() -> None:
    for first, others in cells():
        for cell in (first, *others):
            rest = FIGURE.sub("", cell)
            assert not re.search(r"\d", rest), f"{first}: {cell}"


def test_the_formulas_of_the_step_are_those_of_the_planner(planned: Planned) -> None:
    names, lines = planned.names(), dict(cells())
    for phase in planned.plan.phases:
        seconds, moved, memory = (eval(FIGURE.fullmatch(cell)[3], names) for cell in lines[phase.name])  # type: ignore[index]
        assert seconds == pytest.approx(phase.cost.seconds, rel=1e-9)
        assert moved == pytest.approx(phase.cost.moved, rel=1e-9)
        assert memory == pytest.approx(phase.bytes, rel=1e-8)
    assert names["step"] == pytest.approx(planned.plan.seconds, rel=1e-9)


def test_a_step_on_halves_of_the_devices_takes_what_the_planner_says(planned: Planned) -> None:
    halves = {"pools": {"training": {"ranks": 32}, "generation": {"ranks": 32}}, "rollout": "generation"}
    settings = {**planned.plan.config.model_dump(exclude_unset=True), "placement": halves}
    settings["placement"] |= {"actor": "training", "reference": "training"}
    split = plan(TrainConfig.model_validate(settings), planned.models, planned.machine, planned.work)
    names, found = planned.names(), {phase.name: phase for phase in split.phases}
    assert found["generate"].cost.seconds == pytest.approx(eval("generate(2*S)", names), rel=1e-9)
    assert found["reference log_probs"].cost.seconds == pytest.approx(eval("reference(N/2, 2*F)", names), rel=1e-9)
    assert found["actor update"].cost.seconds == pytest.approx(eval("update(N/2, 2*F)", names), rel=1e-9)
    held = found["actor update"].memory
    assert sum(held[name] for name in ("actor weights", "actor optimizer", "reference weights")) == pytest.approx(
        eval("2*state", names), rel=1e-8
    )


def test_what_the_page_concludes_follows_from_its_figures(planned: Planned) -> None:
    """Of the designs: which receives and holds least, and which does not fit."""
    names, lines = planned.names(), dict(cells())

    def line(begins: str) -> list[float]:
        cells = next(others for first, others in lines.items() if first.startswith(begins))
        return [eval(found[3], names) for cell in cells if (found := FIGURE.fullmatch(cell))]

    for begins in ("Received by a rank", "Generation's weights", "Memory at the hand-over", "Seconds of a step"):
        first, *others = line(begins)
        sharing = others[:2] if begins.startswith("Memory") else others
        assert first < min(sharing), begins
    fits = [memory <= names["usable"] for memory in line("Memory at the hand-over")]
    assert fits == [True, False, True, True]
    own_devices = line("Seconds of a step")[3] / line("Seconds of a step")[0]
    hand_over = max(line("Seconds of a hand-over")) / names["step"]
    assert hand_over < 0.1 < own_devices - 1
    assert names["C"] == pytest.approx(0.45 * names["Q"])
