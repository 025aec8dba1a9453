"""What the bench of the server makes of its turns, worked out by hand."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from loadtests import bench_serve
from loadtests.bench_serve import Cell, Target, Turn
from loadtests.paired import Ratio

SERVERS = cast("tuple[Target, Target]", (object(), object()))


def turn(rps: float, *, api: float = 1.0, times: list[float] | None = None, stream: bool = False) -> Turn:
    values = {"rps": rps, "api_cpu": api, "engine_cpu": 2.0, "sealing_cpu": 0.0}
    latencies = times or [1.0] * 20
    return Turn(values, {"latency": latencies} | ({"first_token": latencies} if stream else {}))


def cell(part: str, rates: list[float], *, clients: int = 1, api: float = 1.0, slower: float = 1.0) -> Cell:
    """A pair for each rate; theirs is 1.0, and ours takes ``slower`` times as long."""
    found = Cell(part, clients, 16)
    for rate in rates:
        ours = turn(rate, api=api, times=[slower] * 20, stream=part == "stream")
        found.add(ours, turn(1.0, stream=part == "stream"))
    return found


def test_the_worst_cell_is_reported_beside_the_mean_of_all() -> None:
    cells = [
        cell("plain", [1.0] * 5, clients=1, api=0.5, slower=1.1),
        cell("plain", [0.9] * 5, clients=8, api=0.72, slower=1.3),
        cell("stream", [1.2] * 5, api=0.8, slower=0.9),
    ]
    found = bench_serve.figures_of(cells)
    assert found["api_cpu_over_vllm.plain"].value == pytest.approx(0.6)
    assert found["api_cpu_over_vllm_worst.plain"].value == pytest.approx(0.72)
    assert found["api_cpu_over_vllm_worst.stream"].value == pytest.approx(0.8)
    assert found["min_ratio_rps.plain"].value == pytest.approx(0.9)
    assert found["engine_cpu_over_vllm"].value == pytest.approx(1.0)
    assert found["max_ratio_p99"].value == pytest.approx(1.3)
    assert found["max_ratio_first_token_p99"].value == pytest.approx(0.9)


def test_each_part_by_itself_has_its_figures_alone() -> None:
    assert set(bench_serve.figures_of([cell("front_end", [0.9] * 3)])) == {"front_end_on_over_off"}
    assert set(bench_serve.figures_of([cell("fleet", [0.9] * 3)])) == {"fleet_over_two"}
    several = bench_serve.figures_of([cell("api_processes", [1.5] * 3)])
    assert several["api_processes_over_one.rps"].value == pytest.approx(1.5)


def test_a_p99_of_so_few_answers_that_it_is_the_greatest_counts_for_nothing_and_is_named() -> None:
    few, enough = cell("plain", [1.0] * 4, slower=9.0), cell("plain", [1.0] * 5, clients=8, slower=1.3)
    found = bench_serve.summary([few, enough], {"plain_stream": "time"})
    assert found["max_ratio_p99"] == 1.3
    assert found["max_ratio_p50"] == 9.0
    assert found["too_few_answers"] == {"latency_p99": ["plain_1_clients_16_tokens"]}
    assert "latency_p99" not in found["cells"]["plain_1_clients_16_tokens"]["ratios"]
    assert "max_ratio_p99" not in bench_serve.figures_of([few])


def test_the_last_line_is_json_though_one_turn_alone_has_a_figure() -> None:
    one = cell("plain", [1.0] * 3)
    one.ratios["sealing_cpu"].append(0.1)
    json.dumps(bench_serve.summary([one], {}), allow_nan=False)


def test_a_figure_is_judged_by_its_bar_and_one_without_a_bar_only_has_its_interval() -> None:
    assert bench_serve.verdict("fleet_over_two", Ratio(0.95, 0.92, 0.98))["verdict"] == "met"
    assert bench_serve.verdict("fleet_over_two", Ratio(0.95, 0.85, 1.05))["verdict"] == "undecided"
    assert bench_serve.verdict("engine_cpu_over_vllm", Ratio(1.1, 1.04, 1.2)) == {
        "bar": "at most 1.03",
        "verdict": "missed",
        "interval": [1.04, 1.2],
    }
    assert bench_serve.verdict("api_cpu_over_vllm_worst.plain", Ratio(0.5, 0.4, 0.6)) == {"interval": [0.4, 0.6]}


def test_a_narrow_interval_ends_a_cell_from_ten_pairs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "_turn", lambda *_: turn(1.0))
    cells = [Cell("plain", clients, 16) for clients in (1, 8)]
    assert bench_serve.measure(cells, *SERVERS, 1.0, float("inf")) == "interval"
    assert [each.pairs for each in cells] == [10, 10]


def test_when_time_is_over_each_cell_has_three_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "_turn", lambda *_: turn(1.0))
    cells = [Cell("plain", clients, 16) for clients in (1, 8)]
    assert bench_serve.measure(cells, *SERVERS, 1.0, 0.0) == "time"
    assert [each.pairs for each in cells] == [3, 3]


def test_the_order_within_pairs_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def measured(_: Cell, server: Target, seconds: float) -> Turn:
        loaded.append(server)
        return turn(seconds)

    monkeypatch.setattr(Cell, "_turn", measured)
    one, (ours, theirs) = Cell("plain", 1, 16), SERVERS
    for _ in range(2):
        one.add_pair(ours, theirs, 1.0)
    assert loaded == [ours, theirs, theirs, ours]
