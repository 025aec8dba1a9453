"""Sets of other tools, in and out: ``record_files`` (reads them), ``trl`` (what their rows mean), ``export`` (the
lake's feedback as such sets) and ``imports`` (such sets as rows of the lake).
"""

from typing import Literal

ImportForm = Literal["trl-preference", "trl-kto", "trl-sft"]
ExportForm = Literal["trl-preference", "trl-kto", "trl-sft", "prompts"]
Style = Literal["auto", "messages", "text"]
"""Whether exported prompts are chat messages or text."""
