"""What a process is told of devices and cores by its environment. For processes that start others
without computing anything themselves: PyTorch is not imported.
"""

import os
from collections.abc import Sequence

VISIBLE_DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
)


def thread_environment(num_processes: int) -> dict[str, str]:
    """Environment of one of so many processes that compute at the same time on this machine's
    cores: an equal share of threads, unless the user has set it.

    Threads wait passively: on a machine that does anything else beside, spinning ones make a small
    model's step ten times slower.
    """
    share = max(1, (os.cpu_count() or 1) // max(1, num_processes))
    defaults = {"OMP_NUM_THREADS": str(share), "OMP_WAIT_POLICY": "PASSIVE"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def only_devices(ids: Sequence[int]) -> dict[str, str]:
    """Environment of a process that sees these devices, in this order, by their physical ids.

    To be asked where the parent sees some: it is their variable that is set.
    """
    visible = ",".join(map(str, ids))
    return {name: visible for name in VISIBLE_DEVICE_VARIABLES if name in os.environ}
