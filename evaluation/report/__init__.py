"""The report, one HTML file that needs nothing else: ``page`` and its ``templates``, ``charts`` (SVG)."""
