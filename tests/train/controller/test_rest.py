"""What is left in a process whose workers rest."""

from __future__ import annotations

import gc
import weakref

from train.controller.worker import Workers


class Model:
    """A cycle, as a sharded model and its optimizer are."""

    def __init__(self) -> None:
        self.itself = self


def test_what_a_run_built_before_vllm_froze_the_heap_is_freed() -> None:
    model = Model()
    known = weakref.ref(model)
    gc.freeze()  # as vLLM does once its engine has started
    try:
        del model
        gc.collect()
        assert known() is not None
        Workers().rest()
        assert known() is None
    finally:
        gc.unfreeze()
