"""What the hooks on saved tensors do with a tensor."""

import gc

import pytest
import torch
from torch import Tensor

from train.offload.activations import LEAST_BYTES, Carrier, _Passage, _Saved
from train.offload.host_pool import HostPool

CPU = torch.device("cpu")


def passage_of(staying: list[Tensor] | None = None, limit_bytes: int = 1 << 20) -> _Passage:
    return _Passage(Carrier(HostPool(limit_bytes, pinned=False), CPU), None, staying or [])


@pytest.mark.req("A10")
def test_a_piece_of_memory_goes_once_and_comes_back_as_it_lay() -> None:
    passage = passage_of()
    whole = torch.randn(64, 48)
    views = [whole, whole.t(), whole[3:9, ::2], whole.bfloat16().t()]
    kept = [passage.pack(view) for view in views]
    pool = passage._carrier.pool
    # Whole pages: three of the first, two of the copy in bf16.
    assert pool.held_bytes == 5 * 4096
    for packed, view in zip(kept, views, strict=True):
        found = passage.unpack(packed)
        assert torch.equal(found, view) and found.stride() == view.stride() and found.dtype == view.dtype
        assert found.data_ptr() != view.data_ptr()
    del kept, packed
    gc.collect()
    again = passage.pack(torch.zeros(64, 48))
    assert isinstance(again, _Saved) and pool.held_bytes == 5 * 4096


@pytest.mark.req("A10")
def test_what_is_changed_in_place_is_another_content() -> None:
    passage = passage_of()
    tensor = torch.zeros(1000)
    before = passage.pack(tensor)
    tensor.add_(1)
    after = passage.pack(tensor)
    assert not passage.unpack(before).any() and passage.unpack(after).all()


@pytest.mark.req("A10")
def test_memory_that_was_freed_and_given_to_another_is_told_apart() -> None:
    passage = passage_of()
    kept = []
    for value in range(20):
        kept.append(passage.pack(torch.full((2000,), float(value))))
    for value, packed in enumerate(kept):
        assert bool((passage.unpack(packed) == value).all())


@pytest.mark.req("A10", "C6")
def test_what_must_not_go_stays() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    passage = passage_of([weight])
    small = torch.zeros(LEAST_BYTES // 4 - 1)
    for tensor in (weight, weight.t(), weight.detach()[3:], small, torch.zeros(1000, dtype=torch.int64)):
        assert passage.pack(tensor) is tensor
    assert passage._carrier.pool.held_bytes == 0


def test_without_room_a_tensor_stays(capsys: pytest.CaptureFixture[str]) -> None:
    passage = passage_of(limit_bytes=4096)
    first, second = torch.zeros(1024), torch.zeros(1024)
    kept = passage.pack(first)
    assert isinstance(kept, _Saved) and passage.pack(second) is second
    assert "stay on the device" in capsys.readouterr().out
