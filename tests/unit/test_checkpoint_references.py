"""Weights and moments are listed once, and again when they are no longer where they were."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from train.checkpoint.references import References, Trees


class Counted:
    """A model in training, and how often its state was listed."""

    def __init__(self) -> None:
        self.first = nn.Linear(3, 4)
        self.model = nn.Sequential(self.first, nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.step()
        self.references, self.listed = References(), 0

    def step(self) -> None:
        loss: Tensor = self.model(torch.randn(5, 3)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def list(self) -> Trees:
        self.listed += 1
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return model, optimizer["state"]  # type: ignore[return-value]

    def trees(self) -> Trees:
        return self.references.of(self.optimizer, self.list)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) if isinstance(value, Tensor) else same(value, right[name])
        for name, value in left.items()
    )


def is_current(case: Counted) -> bool:
    model, moments = case.trees()
    listed = case.listed
    now_model, now_moments = case.list()
    case.listed = listed
    return same(model, now_model) and same(moments, now_moments)


@pytest.mark.req("C8")
def test_what_stays_where_it_is_is_listed_once() -> None:
    case = Counted()
    for _ in range(3):
        assert is_current(case)
        case.step()
        case.trees()[0].clear()
        case.trees()[1]["0.weight"].clear()
    assert case.listed == 1


@pytest.mark.req("C8")
def test_what_has_moved_is_listed_again() -> None:
    case = Counted()
    case.trees()
    weight = case.first.weight
    weight.data = weight.data.clone()
    assert is_current(case) and case.listed == 2
    case.optimizer.load_state_dict(case.optimizer.state_dict())
    case.optimizer.state[weight]["exp_avg"] = torch.ones(4, 3)
    assert is_current(case) and case.listed == 3
    case.optimizer.state.clear()
    case.step()
    assert is_current(case) and case.listed == 4


def test_copies_are_not_kept() -> None:
    case = Counted()
    references = References()

    def copied() -> Trees:
        model, moments = case.list()
        return {name: value.clone() for name, value in model.items()}, moments

    for count in (1, 2):
        references.of(case.optimizer, copied)
        assert case.listed == count


def test_what_was_replaced_is_not_held() -> None:
    import gc
    import weakref

    case = Counted()
    case.trees()
    old = weakref.ref(case.optimizer.state[case.first.weight]["exp_avg"])
    case.references.forget()
    case.optimizer.state.clear()
    gc.collect()
    assert old() is None


@pytest.mark.req("C8")
def test_it_is_known_whether_the_tensors_of_the_optimizer_are_all_there() -> None:
    case = Counted()
    case.trees()
    assert case.references.complete
    case.references.forget()
    assert not case.references.complete

    def without_one() -> Trees:
        model, moments = case.list()
        return {name: value for name, value in model.items() if name != "0.bias"}, moments

    case.references.of(case.optimizer, without_one)
    assert not case.references.complete
