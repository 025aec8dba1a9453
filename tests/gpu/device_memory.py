"""What the processes of one test hold of a device, whatever others on the machine do with it meanwhile."""

from __future__ import annotations

import os


def free_bytes() -> int:
    """Of the first device, less what this process and those below it hold.

    Where the driver does not say what each process holds, as in some containers, what nobody holds.
    """
    import psutil
    import torch

    free, total = torch.cuda.mem_get_info(0)
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    held = [bytes_held for pid, bytes_held in _by_process() if pid in own and bytes_held is not None]
    return int(total - sum(held)) if held else int(free)


def _by_process() -> list[tuple[int, int | None]]:
    """(process, bytes that it holds of the first device; None where the driver does not say)."""
    import torch

    try:
        import pynvml
    except ImportError:
        return []
    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        return [(of.pid, of.usedGpuMemory) for of in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
    finally:
        pynvml.nvmlShutdown()
