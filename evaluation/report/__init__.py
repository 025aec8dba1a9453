"""The report, one HTML file that needs nothing else: ``page`` (writes it, from what ``deploy.display.report_data``
gathers) with ``templates`` (the HTML), ``charts`` (its pictures, as SVG), ``rows`` (what it shows of results,
promotions, experiments and runs), ``evidence`` (what the ledger shows of each candidate, and what was spent).
"""
