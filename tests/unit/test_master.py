"""The update of an optimizer whose states lie elsewhere: its numbers, what it keeps in memory, and its order."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import train.optim.master
from train.config import OptimConfig
from train.model.config import ModelConfig
from train.offload.buckets import make_buckets
from train.offload.gradients import OnDevice, OnHost
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore
from train.offload.nvme_states import NvmeStates
from train.offload.states import Resident, States
from train.offload.transfer import Transfer
from train.offload.weights import InPlace, Staged
from train.optim.master import MasterAdamW

CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1)


class Layers(nn.Module):
    """Some layers of one matrix and one vector each."""

    def __init__(self, count: int, shape: tuple[int, int] = (5, 7)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(*shape) for number in range(count)})


def build(count: int, dtype: torch.dtype, states: States | None = None, late: bool = False) -> "Case":
    torch.manual_seed(3)
    return Case(nn.ModuleList([Layers(count).to(dtype)]), states or Resident(CPU, pinned=False), late)


class Case:
    """Parts with an optimizer that keeps fp32 weights of its own."""

    def __init__(self, parts: nn.ModuleList, states: States, late: bool) -> None:
        self.parts = parts
        buckets = make_buckets(parts, ModelConfig())
        transfer = Transfer(CPU)
        weights = Staged(buckets, transfer, later=True) if late else InPlace(buckets)
        self.start = {name: p.detach().float().clone() for name, p in parts.named_parameters()}
        self.optimizer = MasterAdamW(
            parts, buckets, OPTIM, states, OnHost(buckets, [], transfer), weights, background=True
        )
        self.optimizer.fill(lambda name, shape, where: self.start[f"0.{name}"][where])

    def step(self, gradients: Sequence[Tensor], factor: float | None = None) -> None:
        for parameter, gradient in zip(self.parts.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        if factor is not None:
            self.optimizer.scale_gradients(torch.tensor(factor))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        self.optimizer.finish()
        return [
            stored.read().clone() for path, stored in self.optimizer.stored().items() if path[0] == "model"
        ]


def plain_course(case: Case, steps: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Weights of torch's own AdamW, in fp32, at the start and after each step."""
    weights = [nn.Parameter(value.clone()) for value in case.start.values()]
    groups = [
        {"params": [w for w in weights if w.ndim == 2], "weight_decay": OPTIM.weight_decay},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, fused=True
    )
    course = [[w.detach().clone() for w in weights]]
    for gradients in steps:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.float()
        optimizer.step()
        course.append([w.detach().clone() for w in weights])
    return course


def some_gradients(case: Case, count: int) -> list[list[Tensor]]:
    torch.manual_seed(4)
    return [[torch.randn_like(p) for p in case.parts.parameters()] for _ in range(count)]


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.req("C6", "A11")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1 << 18, 16])
def test_weights_are_those_of_torch(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever chunks; what computes is the fp32 weight rounded, and no sum of rounded updates."""
    monkeypatch.setattr(train.optim.master, "CHUNK", chunk)
    case = build(3, dtype)
    steps = some_gradients(case, 4)
    for gradients in steps:
        case.step(gradients)
    expected = plain_course(case, steps)[-1]
    assert_equal(case.weights(), expected)
    assert_equal([p.detach() for p in case.parts.parameters()], [weight.to(dtype) for weight in expected])
    case.optimizer.close()


@pytest.mark.req("A11")
def test_a_delayed_update_sends_its_weights_with_the_next() -> None:
    case = build(3, torch.bfloat16, late=True)
    steps = some_gradients(case, 4)
    course = plain_course(case, steps)
    for done, gradients in enumerate(steps):
        case.step(gradients)
        # The step that was just done has computed with these, and so will the next.
        old = course[max(done, 0)]
        assert_equal([p.detach() for p in case.parts.parameters()], [w.bfloat16() for w in old])
    case.optimizer.finish()
    assert_equal([p.detach() for p in case.parts.parameters()], [w.bfloat16() for w in course[-1]])
    assert_equal(case.weights(), course[-1])
    case.optimizer.close()


def test_gradients_of_a_step_are_not_those_of_the_next() -> None:
    """An update that is still reading them must not see what a backward writes meanwhile."""
    free = threading.Event()

    class Slow(Resident):
        def get(self, index: int) -> Tensor:
            assert not self.waits or free.wait(30)
            return super().get(index)

        waits = False

    states = Slow(CPU, pinned=False)
    case = build(2, torch.bfloat16, states, late=True)
    steps = some_gradients(case, 2)
    states.waits = True
    case.step(steps[0])
    for parameter, gradient in zip(case.parts.parameters(), steps[1], strict=True):
        parameter.grad = gradient.clone()
    case.optimizer.gradients()
    free.set()
    case.optimizer.step()
    assert_equal(case.weights(), plain_course(case, steps)[-1])
    case.optimizer.close()


def test_rates_and_the_factor_are_those_of_the_step() -> None:
    """A loop sets the next step's rate while an update is still at work; a factor holds for one step."""
    case = build(2, torch.float32)
    (gradients,) = some_gradients(case, 1)
    case.step(gradients, factor=0.5)
    for group in case.optimizer.param_groups:
        group["lr"] = 100.0
    halved = [gradient * 0.5 for gradient in gradients]
    assert_equal(case.weights(), plain_course(case, [halved])[-1])
    for group in case.optimizer.param_groups:
        group["lr"] = OPTIM.lr
    case.step(gradients)
    assert_equal(case.weights(), plain_course(case, [halved, gradients])[-1])
    case.optimizer.close()


def test_a_parameter_without_gradient_stays() -> None:
    case = build(2, torch.bfloat16)
    (gradients,) = some_gradients(case, 1)
    before = [p.detach().clone() for p in case.parts.parameters()]
    first, *rest = case.parts.parameters()
    for parameter, gradient in zip(rest, gradients[1:], strict=True):
        parameter.grad = gradient
    case.optimizer.step()
    case.optimizer.finish()
    assert torch.equal(first, before[0])
    assert not torch.equal(rest[0], before[1])
    case.optimizer.close()


def test_gradients_that_stay_are_taken_and_forgotten() -> None:
    parts = nn.ModuleList([Layers(2)])
    gradients = OnDevice(make_buckets(parts, ModelConfig()), None)
    for parameter in parts.parameters():
        parameter.grad = torch.ones_like(parameter)
    taken = gradients.take()
    assert gradients.found() == {} and gradients.moved_bytes == 0
    assert [gradient.sum() for gradient in taken.get(1) if gradient is not None] == [35, 7]


def test_gradients_far_from_an_update_come_two_buckets_at_a_time() -> None:
    parts = nn.ModuleList([Layers(4)])
    buckets = make_buckets(parts, ModelConfig())
    gradients = OnDevice(buckets, Transfer(CPU))
    for number, parameter in enumerate(parts.parameters()):
        parameter.grad = torch.full_like(parameter, number, dtype=torch.float32)
    taken = gradients.take()
    for index in range(len(buckets)):
        if index + 1 < len(buckets):
            taken.ask(index + 1)
        found = taken.get(index)
        assert [float(one.mean()) for one in found if one is not None] == [2 * index, 2 * index + 1]
        taken.put(index)
    assert gradients.moved_bytes == 4 * sum(p.numel() for p in parts.parameters())


def nvme_states(path: Path, ahead: int, block_bytes: int = 4096) -> NvmeStates:
    identity = Identity.of(path / "run", 0, "optimizer")
    store = NvmeStore(
        [path], identity, NvmeSettings(block_bytes=block_bytes), checksum=True, warn=lambda _: None
    )
    return NvmeStates(store, ahead, pinned=False)


@pytest.mark.req("C6")
@pytest.mark.parametrize("ahead", [1, 3])
def test_states_on_nvme_give_the_same_weights(tmp_path: Path, ahead: int) -> None:
    states = nvme_states(tmp_path, ahead)
    case = build(8, torch.bfloat16, states)
    steps = some_gradients(case, 3)
    for gradients in steps:
        case.step(gradients)
    assert_equal(case.weights(), plain_course(case, steps)[-1])
    # Once to be filled, once a step, once to be looked at: nothing is read that goes before it is used.
    assert states.traffic().read_bytes <= 5 * 12 * 8 * 42
    case.optimizer.close()
    assert not list(tmp_path.glob("trierarch-*"))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=7),
    ahead=st.integers(1, 3),
    calls=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["ask", "read", "write"])), max_size=30),
)
def test_blocks_on_nvme_are_what_was_put_last(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ahead: int, calls: list[tuple[int, str]]
) -> None:
    """In any order of calls, with a pool that is smaller than the blocks."""
    states = nvme_states(tmp_path_factory.mktemp("nvme"), ahead)
    states.allocate(sizes)
    # Of each size so many as may be in use.
    assert states.held_bytes <= sum(
        min(ahead + 2, sizes.count(size)) * (12 * size + 4096) for size in set(sizes)
    )
    kept = [torch.zeros(3, size) for size in sizes]
    for number, (index, call) in enumerate(calls):
        index %= len(sizes)
        states.ask(index)
        if call == "ask":
            continue
        block = states.get(index)
        assert torch.equal(block, kept[index])
        if call == "write":
            block.fill_(number + 1)
            kept[index].fill_(number + 1)
        states.put(index, changed=call == "write")
    states.close()
