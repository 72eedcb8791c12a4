"""Import once, in the parent, what each rank would import anew: the seconds that a restart from nothing takes."""

import gc
import importlib
import os
import sys

from train.resilience.process import thread_count

PRELOADED = (
    "train.__main__",
    "train.run",
    # What torch and we import at first use only.
    "numpy.ma",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
)

QUIET_IMPORTS = {
    # Else it starts threads; ranks compute with torch, not with numpy.
    "OPENBLAS_NUM_THREADS": "1",
    # Has torch ask NVML whether there are GPUs: asking CUDA spoils it for every process forked later.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""With one of these libgomp binds this process, and so all ranks, to the node's first core as torch is imported."""


def preload() -> None:
    """Import all that a rank needs, and leave the process in a state to be forked in: one thread, no device."""
    before = {name: os.environ.get(name) for name in (*QUIET_IMPORTS, *BINDING)}
    os.environ.update(QUIET_IMPORTS)
    for name in BINDING:
        os.environ.pop(name, None)
    for name in PRELOADED:
        importlib.import_module(name)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if thread_count() > 1:
        print(f"agent: {thread_count()} threads before the fork: ranks may hang", file=sys.stderr, flush=True)
    # A collection in a child would write to every page of what it shares with the others.
    gc.collect()
    gc.disable()
    gc.freeze()
