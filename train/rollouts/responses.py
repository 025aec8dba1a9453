"""Many responses at once on one engine, which goes on with them whatever weights it has meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serve.vllm.boot import add_request
from train.batch.packed import Sample
from train.rollouts.request import Request


class Sampling(Protocol):
    """What samples on the engine of this process: single responses, or episodes.

    ``busy``: something has begun and not ended. ``samples``: the engine has something to do now.
    """

    @property
    def busy(self) -> bool: ...

    @property
    def samples(self) -> bool: ...

    def start(self, request: Request) -> None: ...

    def step(self) -> dict[str, Any]:
        """One step of the engine; what ended with it, by the keys of the requests."""

    def abort(self) -> None:
        """Forget all that is under way."""


class Responses:
    """Single responses.

    Args:
        engine: vLLM's LLMEngine.
        params: makes vLLM's sampling parameters of a request.
        to_sample: reads a completion, of the prompt's token ids.
        salt: what prefixes are cached under that are computed now.
        adapter: the number of the engine's adapter that samples; None: its weights do.
    """

    def __init__(
        self,
        engine: Any,
        params: Callable[[Request], Any],
        to_sample: Callable[[Any, list[int]], Sample],
        salt: Callable[[], str],
        adapter: int | None = None,
    ) -> None:
        self._engine, self._params, self._to_sample = engine, params, to_sample
        self._salt, self._adapter = salt, adapter
        self._under_way: dict[str, Request] = {}

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    samples = busy

    def start(self, request: Request) -> None:
        params, salt = self._params(request), self._salt()
        add_request(self._engine, request.key, request.prompt, params, cache_salt=salt, adapter=self._adapter)
        self._under_way[request.key] = request

    def step(self) -> dict[str, Sample]:
        ended = {}
        for output in self._engine.step():
            if output.finished:
                request = self._under_way.pop(output.request_id)
                ended[request.key] = self._to_sample(output.outputs[0], request.prompt)
        return ended

    def abort(self) -> None:
        self._engine.abort_request(list(self._under_way))
        self._under_way.clear()


def until_ended(sampling: Sampling, requests: Sequence[Request], ended: dict[str, Any]) -> list[Any]:
    """Start the requests, and step until all have ended: what came of each.

    What was under way before goes on; what of it ends meanwhile is put into ``ended``. After a failure nothing is under
    way.
    """
    try:
        for request in requests:
            sampling.start(request)
        mine: dict[str, Any] = {}
        wanted = {request.key for request in requests}
        while wanted - mine.keys():
            for key, found in sampling.step().items():
                (mine if key in wanted else ended)[key] = found
    except BaseException:
        sampling.abort()  # the engine may outlive it
        raise
    return [mine[request.key] for request in requests]
