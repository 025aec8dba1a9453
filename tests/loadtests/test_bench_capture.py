"""What the bench of the data plane makes of its measurements."""

from __future__ import annotations

import pytest

from loadtests.bench_capture import BARS, ratios_of

TURNS = [1.0, 1.0]
CAPTURED = {
    "journal": [600.0, 600.0],
    "alone": [800.0, 800.0],
    "disk": [1000.0, 1000.0],
    "sqlite": [100.0, 100.0],
    "sqlite_grouped": [300.0, 300.0],
    **{f"{name}_ms_{percent}": TURNS for name in ("added", "fdatasync") for percent in ("p50", "p99")},
}
STORED = {
    f"{name}_s": TURNS
    for name in ("seal", "compact", *(f"deltalake_{of}{end}" for of in ("seal", "compact") for end in ("", "_synced")))
}
SCORED = {"seconds": {"large new": [2.0, 2.0], "small new": TURNS, "large late": [3.0, 3.0], "small late": TURNS}}


def test_every_bar_has_its_ratio_and_the_journal_stands_beside_the_disk_with_a_sealer_and_without() -> None:
    found = ratios_of(CAPTURED, STORED, SCORED)
    assert set(BARS) <= set(found)
    values = {name: ratio.value for name, ratio in found.items()}
    assert values["durable_over_disk"] == pytest.approx(0.8)
    assert values["durable_beside_sealer_over_disk"] == pytest.approx(0.6)
    assert values["durable_over_sqlite"] == pytest.approx(6)
    assert values["durable_over_sqlite_grouped"] == pytest.approx(2)
    assert values["scoring_history_ratio"] == pytest.approx(2)
    assert values["scoring_late_history_ratio"] == pytest.approx(3)
