"""Is this policy better? Suites, statistics, gate, report.

Read ``evaluate`` (one policy against another), then ``suites`` (items and answers), ``engine`` (the offline vLLM
engine), ``judging`` (scores without right answers), ``statistics`` (intervals and tests), ``decisions`` (the gate,
and the ledger of its verdicts), ``shadow`` (a candidate on a copy of requests), ``experiments`` (a candidate on live
traffic), ``estimation`` (what a candidate would earn on logged traffic), ``best_of`` (what choosing among several
responses reaches without training), ``compared_rewards`` (training's reward beside one that it did not see),
``results`` (what is kept on disk), ``harness`` (lm-eval and Inspect, unchanged), ``report`` (one HTML file), ``config``
(settings of evaluation).
"""
