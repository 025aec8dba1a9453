"""Is this policy better? Suites, statistics, gate, report.

Read ``evaluate`` (one policy against another), then ``suites`` (items and answers), ``judging`` (scores without right
answers), ``statistics`` (intervals), ``gate`` (the verdict), ``best_of`` (a baseline), ``report``. ``engine`` is the
offline vLLM engine; ``results`` is what is kept on disk.
"""
