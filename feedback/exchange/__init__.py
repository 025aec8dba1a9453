"""Sets of other tools, in and out: ``record_files`` (reads them), ``trl`` (what their rows mean), ``export`` (the
lake's feedback as such sets) and ``imports`` (such sets as rows of the lake).
"""
