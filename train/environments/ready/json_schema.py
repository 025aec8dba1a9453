"""JSON that a schema allows."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from train.environments.ready.single_turn import SingleTurn
from train.environments.ready.verifier import verdict

_FENCED: Final = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


class JsonSchema(SingleTurn):
    """Reward 1 where a response is JSON, also in a fence, that the schema allows, else 0."""

    def __init__(
        self,
        schema: dict[str, Any] | None = None,
        metadata: str = "schema",
        seconds: float = 5.0,
        system: str | None = None,
    ) -> None:
        """``schema``: of all prompts; None: each prompt's own, as JSON in its ``metadata``."""
        super().__init__(system)
        if schema is not None:
            import jsonschema

            jsonschema.validators.validator_for(schema).check_schema(schema)
        self.schema, self.key, self.seconds = schema, metadata, seconds

    async def verdict(self, text: str) -> float:
        schema = self.schema if self.schema is not None else json.loads(self.metadata(self.key))
        fenced = _FENCED.findall(text)
        return float(await verdict("json_schema", fenced[-1] if fenced else text, schema, seconds=self.seconds))
