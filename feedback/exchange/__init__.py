"""Sets of other tools, in and out: ``record_files`` (reads JSONL, Parquet and Arrow files), ``trl`` (what TRL's rows
mean), ``imports`` (such sets as rows of the lake), ``export`` (the lake's feedback as such sets).
"""

from typing import Literal

ImportForm = Literal["trl-preference", "trl-kto", "trl-sft"]
ExportForm = Literal["trl-preference", "trl-kto", "trl-sft", "prompts"]
Style = Literal["auto", "messages", "text"]
"""Whether exported prompts are chat messages or text."""
