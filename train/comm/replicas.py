"""How the replicas of `DistributedDataParallel` average their gradients, where not by one all-reduce over all."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from contract.allreduce_plan import FLAT, HIERARCHICAL, AllReducePlan
from train.comm.check import find_plan, no_use
from train.comm.config import AllReduce
from train.comm.hierarchical import HierarchicalAllReduce
from train.config import TrainConfig
from train.mesh import Mesh

Reduce = Callable[[Tensor], None]
"""Adds a tensor up over all ranks, in place."""


def choose_allreduce(
    model: DistributedDataParallel, config: TrainConfig, mesh: Mesh, device: torch.device
) -> None:
    """Have `model` average its gradients as `config.comm` says. Collective."""
    wish = config.comm.allreduce
    if wish is AllReduce.ring or no_use(config, mesh.dims, mesh.ranks_per_node):
        return
    by_node = mesh.by_node()
    nodes = by_node["between"].size()
    hierarchical = HierarchicalAllReduce(by_node["inside"].get_group(), by_node["between"].get_group())
    reduce: Reduce = hierarchical
    if wish is AllReduce.auto:
        plan = _shared(find_plan(config, mesh.ranks_per_node) if dist.get_rank() == 0 else None)
        if plan is None:
            if dist.get_rank() == 0:
                print(
                    "trierarch: the network test left no plan, gradients take one all-reduce", file=sys.stderr
                )
            return
        # DDP's own way is as good and simpler where no size asks for another.
        if all(algorithm in FLAT for _, algorithm in plan.switches_for(nodes)):
            return

        def reduce(tensor: Tensor) -> None:
            if plan.choose(nodes, tensor.nbytes) == HIERARCHICAL:
                hierarchical(tensor)
            else:
                dist.all_reduce(tensor, group=mesh.dp_cp.get_group())

    model.register_comm_hook(_Averager(reduce, mesh.dp_cp.size(), device), _average)


def _shared(plan: AllReducePlan | None) -> AllReducePlan | None:
    """Return rank 0's plan: where a shared file system lags, others might read another, and choose otherwise."""
    told = [plan]
    dist.broadcast_object_list(told)
    return told[0]


class _Averager:
    """Runs reductions beside the backward pass, one after another in the order in which buckets are ready.

    One order is what all ranks share: a bucket's second step must not meet another bucket's on the other side.
    """

    def __init__(self, reduce: Reduce, ranks: int, device: torch.device) -> None:
        self._reduce = reduce
        self._ranks = ranks
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # gloo's operations block; the thread waits outside of Python's lock.
        self._thread = None if self._stream else ThreadPoolExecutor(1, thread_name_prefix="all-reduce")

    def average(self, tensor: Tensor) -> Future[Tensor]:
        """Start to average `tensor` over all ranks in place; the future gives it."""
        if self._stream is not None:
            done: Future[Tensor] = Future(devices=[self._device])
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._work(tensor)
                # Taken with this stream as the current one: whoever waits for the future waits for it.
                done.set_result(tensor)
            return done
        assert self._thread is not None
        result: Future[Tensor] = Future()

        def run() -> None:
            try:
                self._work(tensor)
            except BaseException as error:
                result.set_exception(error)  # type: ignore[arg-type]  # torch says Tensor of its own parameter
            else:
                result.set_result(tensor)

        self._thread.submit(run)
        return result

    @torch.no_grad()
    def _work(self, tensor: Tensor) -> None:
        tensor.div_(self._ranks)
        self._reduce(tensor)


def _average(averager: _Averager, bucket: dist.GradBucket) -> Future[Tensor]:
    return averager.average(bucket.buffer())
