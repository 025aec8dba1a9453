"""The loop: its cycles and their schedule, and every move of the serving pointer.

Read ``cycle`` (score, train, evaluate, promote) with ``records`` (what became of each cycle), ``preflight`` (checks
settings that would fail an hour later), ``recipes`` (what a cycle trains, and what `auto` stands for), ``recovery``
(what the next cycle does about one that was cut off),
``promotion`` (moving the serving pointer, and back), ``wait_for_serving`` (until the server follows it), ``shadows`` (a
candidate on a copy of requests, shown to nobody), ``experiments`` (a candidate on live traffic before it is promoted
for good). ``schedule`` (starts cycles and maintenance when they are due), ``lineage`` (what a policy was trained on),
``traces`` (spans of cycles and rewards as events, for OpenTelemetry).
"""
