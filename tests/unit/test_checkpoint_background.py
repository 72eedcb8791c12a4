"""Copies that a checkpoint is written from, and the thread that writes it."""

import threading
import time
from typing import Any

import pytest
import torch

from train.checkpoint.flight import Flight
from train.checkpoint.staging import Staging, leaves_of
from train.resilience.pulse import Phase, Pulse, adopt, beat, own


def tree_of(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=generator)
    return {
        "model": {"weight": base, "transposed": base.t(), "part": base[2:4, 1:5], "empty": base[:0]},
        "progress": {"step": torch.tensor(seed), "flags": torch.tensor([True, False, True])},
        "short": {"weight": base.bfloat16().requires_grad_()},
    }


def keys(tree: dict[str, Any]) -> list[tuple[str, ...]]:
    return [key for key, _ in leaves_of(tree)]


def equal(left: dict[str, dict[str, torch.Tensor]], right: dict[str, dict[str, torch.Tensor]]) -> bool:
    assert left.keys() == right.keys()
    return all(
        torch.equal(tensor, right[group][name])
        for group, tensors in left.items()
        for name, tensor in tensors.items()
    )


@pytest.mark.req("C9")
def test_a_copy_is_left_alone_and_its_memory_used_again() -> None:
    staging = Staging(lambda: 1 << 20, pinned=False)
    tree = tree_of(1)
    copied = staging.copy(tree, keys(tree))
    assert copied is not None and equal(copied, tree_of(1))
    with torch.no_grad():
        for tensors in tree.values():
            for tensor in tensors.values():
                tensor.zero_()
    assert equal(copied, tree_of(1))
    for tensors in copied.values():
        for name, tensor in tensors.items():
            assert tensor.is_contiguous() and not tensor.requires_grad, name
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, (
                "torch would write more than the tensor"
            )
    place = copied["model"]["weight"].data_ptr()
    held = staging.held_bytes
    again = staging.copy(tree_of(2), keys(tree))
    assert again is not None and equal(again, tree_of(2))
    assert again["model"]["weight"].data_ptr() == place and staging.held_bytes == held
    staging.close()
    assert staging.held_bytes == 0


def test_other_tensors_take_other_memory() -> None:
    staging = Staging(lambda: 1 << 20, pinned=False)
    assert staging.copy({"a": torch.zeros(10)}, [("a",)]) is not None
    both = {"a": torch.ones(5000), "b": torch.ones(2, dtype=torch.int64)}
    grown = staging.copy(both, keys(both))
    assert grown is not None and bool((grown["a"] == 1).all()) and grown["b"].tolist() == [1, 1]


def test_what_others_write_is_not_copied() -> None:
    staging = Staging(lambda: 4096, pinned=False)
    copied = staging.copy({"a": torch.ones(500), "b": torch.ones(5000)}, [("a",)])
    assert copied is not None and copied["a"].sum() == 500
    assert copied["b"].is_meta and copied["b"].shape == (5000,) and staging.held_bytes == 4096


def test_without_room_nothing_is_copied() -> None:
    staging = Staging(lambda: 4096, pinned=False)
    assert staging.copy({"a": torch.zeros(5000)}, [("a",)]) is None and staging.held_bytes == 0
    assert staging.copy({"a": torch.zeros(500)}, [("a",)]) is not None


@pytest.mark.req("C9")
def test_a_save_in_flight_leaves_the_pulse_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that hangs meanwhile must be seen; each attempt that training waits for has a time limit anew."""
    monkeypatch.setattr("train.checkpoint.flight.LOOK_EVERY_S", 0.01)
    flight, told = Flight(7), threading.Semaphore(0)

    class Told(Pulse):
        def beat(self, phase: Phase, step: int | None = None) -> None:
            super().beat(phase, step)
            if phase is Phase.SAVE:
                told.release()

    def work() -> bool:
        for _ in range(2):
            flight.attempts += 1
            assert told.acquire(timeout=10), "nobody has told that training waits"
        return True

    before = own()
    adopt(Told(bytearray(64)))
    try:
        beat(Phase.STEP, 8)
        flight.begin(work)
        time.sleep(0.1)
        assert not flight.over and own().last().phase is Phase.STEP
        assert flight.result() and flight.over
        assert not told.acquire(blocking=False), "an attempt was told twice"
    finally:
        adopt(before)


def test_what_the_thread_raises_is_raised_where_it_is_waited_for() -> None:
    flight = Flight(7)

    def work() -> bool:
        raise OSError("gone")

    flight.begin(work)
    with pytest.raises(OSError, match="gone"):
        flight.result()
