"""The lake's statistics, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from deploy.display.tables import table
from feedback.lake.statistics import LakeStatistics, Orphan


def to_text(statistics: LakeStatistics) -> str:
    """Everything, in sections, for a terminal."""
    sections = (_tables, _journal, _feedback, _rewards, _lag, _anomalies)
    return "\n\n".join(text for section in sections if (text := section(statistics)))


def to_json(statistics: LakeStatistics) -> str:
    """Everything, with the ratios that follow from it."""
    found = asdict(statistics)
    for name, numbers in statistics.tables.items():
        found["tables"][name]["bytes_a_row"] = numbers.bytes_a_row
    found["feedback"]["rate"] = statistics.feedback.rate
    for row, rewards in zip(found["rewards"], statistics.rewards, strict=True):
        row["missing_share"] = rewards.missing_share
        row["components"] = {
            name: {"responses": count, "mean": mean} for name, (count, mean) in rewards.components.items()
        }
    return json.dumps(found, indent=2, default=_time)


def orphans(found: Sequence[Orphan], limit: int) -> str:
    """The orphans, one per line."""
    if not found:
        return "no orphans: every feedback has its response"
    now = datetime.now(UTC)
    rows = [
        [orphan.feedback_id, orphan.response_id, orphan.tenant, orphan.kind, _age(now, orphan.created_at)]
        for orphan in found
    ]
    more = f"\n(the oldest {limit}; --limit lists more)" if len(found) == limit else ""
    return table(["feedback_id", "waits for response", "tenant", "kind", "age"], rows) + more


def orphans_json(found: Sequence[Orphan]) -> str:
    """The orphans, as JSON."""
    return json.dumps([asdict(orphan) for orphan in found], indent=2, default=_time)


def _tables(statistics: LakeStatistics) -> str:
    header = ["table", "rows", "unsealed", "files", "size", "bytes/row", "version", "oldest (UTC)", "newest (UTC)"]
    rows = [
        [
            name,
            f"{numbers.rows:,}",
            f"{numbers.unsealed_rows:,}",
            f"{numbers.files:,}",
            _size(numbers.bytes),
            _number(numbers.bytes_a_row, ".0f"),
            str(numbers.version),
            _moment(numbers.oldest),
            _moment(numbers.newest),
        ]
        for name, numbers in statistics.tables.items()
    ]
    empty = not any(numbers.rows or numbers.unsealed_rows for numbers in statistics.tables.values())
    return table(header, rows) + ("\n\nthe lake is empty" if empty else "")


def _journal(statistics: LakeStatistics) -> str:
    journal = statistics.journal
    return (
        f"journal: {journal.open_segments} open and {journal.closed_segments} closed segments, "
        f"{_size(journal.bytes)}; {journal.damaged_segments} damaged ones put aside; "
        f"{journal.streams} responses going out"
    )


def _feedback(statistics: LakeStatistics) -> str:
    feedback, complete = statistics.feedback, statistics.feedback.complete_responses
    text = f"feedback: {feedback.responses_with_feedback:,} of {complete:,} complete responses have any"
    text += f" ({_number(feedback.rate, '.1%')})"
    rows = [
        [kind, f"{n.feedback:,}", f"{n.responses:,}", _number(n.responses / complete if complete else None, ".1%")]
        for kind, n in sorted(feedback.kinds.items())
    ]
    return f"{text}\n{table(['kind', 'feedback', 'responses', 'rate'], rows)}" if rows else text


def _rewards(statistics: LakeStatistics) -> str:
    if not statistics.rewards:
        return "rewards: none"
    quantiles = sorted({share for row in statistics.rewards for share in row.quantiles})
    components = sorted({name for row in statistics.rewards for name in row.components})
    header = ["policy", "scored", "missing", "mean", "sd", *(_quantile(share) for share in quantiles), *components]
    rows = [
        [
            "-" if row.policy is None else str(row.policy),
            f"{row.responses:,}",
            _number(row.missing_share, ".1%"),
            _number(row.mean),
            _number(row.sd),
            *(_number(row.quantiles.get(share)) for share in quantiles),
            *(_number(row.components[name][1]) if name in row.components else "-" for name in components),
        ]
        for row in statistics.rewards
    ]
    return "rewards by policy (the last columns are the components' means)\n" + table(header, rows)


def _lag(statistics: LakeStatistics) -> str:
    lag = statistics.lag
    if lag.scorer is None:
        return ""
    return (
        f"from response to reward: p50 {_seconds(lag.p50_s)}, p90 {_seconds(lag.p90_s)}, max {_seconds(lag.max_s)}; "
        f"{lag.unscored:,} complete responses have no reward by {lag.scorer}"
    )


def _anomalies(statistics: LakeStatistics) -> str:
    orphans = statistics.orphans
    lines = [
        f"orphans: {orphans.count:,} feedback rows wait for a response that is not there"
        + (f", the oldest for {_age(statistics.at, orphans.oldest)} (--orphans lists them)" if orphans.oldest else "")
    ]
    doubled = {name: numbers.duplicates for name, numbers in statistics.tables.items() if numbers.duplicates}
    listed = ", ".join(f"{count:,} in {name}" for name, count in doubled.items())
    lines.append(f"DUPLICATE IDS: {listed}; this must not be" if doubled else "duplicate ids: none")
    return "\n".join(lines)


def _quantile(share: float) -> str:
    return {0.0: "min", 0.5: "median", 1.0: "max"}.get(share, f"p{share * 100:g}")


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _size(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * seconds:
            return f"{value / seconds:.1f} {unit}"
    return f"{value:.1f} s"


def _age(now: datetime, then: datetime) -> str:
    return _seconds((now - then).total_seconds())


def _moment(value: datetime | None) -> str:
    return "-" if value is None else f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _time(value: Any) -> str:
    if not isinstance(value, datetime):
        raise TypeError(f"{value!r} has no place in JSON")
    return value.astimezone(UTC).isoformat()
