"""What is found out about a machine's devices: the plan's prediction of memory, the driver's numbers, the check-up."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_suite import DEVICE, gpu_test


@gpu_test("part", "memory is what a process has resident", packages=("pydantic", "scipy", "duckdb"))
@pytest.mark.parametrize("number", range(8))
def test_a_plan_predicts_the_memory_that_training_allocates(number: int) -> None:
    from deploy.examples.bench.training import plan

    cases = plan.CASES_OF_GPUS if DEVICE == "cuda" else plan.CASES[2:3]
    cases = [case for case in cases if case in plan.cases_here()][number : number + 1]
    if not cases:
        pytest.skip("there are no more configurations for so many devices")
    (found,) = plan.run_cases(cases)
    assert abs(found["memory_error"]) <= plan.BARS["memory_error_max"], plan.line(found)


@gpu_test("no", "there is no driver to ask", packages=("pynvml",))
def test_the_drivers_numbers_are_those_that_torch_reports() -> None:
    import torch

    from serve.gpus import gpus

    for gpu in gpus()[:1]:
        free, total = torch.cuda.mem_get_info(gpu.index)
        assert gpu.total_bytes == pytest.approx(total, rel=0.03)
        assert gpu.used_bytes == pytest.approx(total - free, abs=2**31)
    assert len(gpus()) >= torch.cuda.device_count()


@gpu_test("part", "a CPU's memory is shared out", packages=("pydantic", "scipy", "duckdb"))
def test_what_a_run_leaves_open_is_decided_by_the_device_that_there_is() -> None:
    import torch

    from train.config.training import TrainConfig
    from train.planner.defaults import unplanned
    from train.run.devices import machine_of_run, this_node

    config = TrainConfig.model_validate({"launcher": "torchrun"})
    machine = machine_of_run(config, 0)
    assert machine is not None
    assert machine.kind == DEVICE
    values = unplanned(config, machine)
    assert values["rollout.enforce_eager"] == (DEVICE == "cpu")
    if DEVICE == "cuda":
        pytest.importorskip("pynvml")
        total = min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
        node = this_node()
        assert node is not None
        assert node.memory == pytest.approx(total, rel=0.03)
        assert machine.memory == torch.cuda.get_device_properties(0).total_memory


@gpu_test("no", "it names no GPU", packages=("pydantic", "duckdb"))
def test_the_check_up_names_each_device() -> None:
    import torch

    from deploy import doctor

    found = [check for check in doctor._devices(None) if check.name.startswith("gpu ")]  # type: ignore[arg-type]
    assert len(found) == torch.cuda.device_count()
    assert torch.cuda.get_device_name(0) in found[0].found
