"""What a backward pass needs, kept on the host meanwhile: the same gradients, little on the device, a bounded pool."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.offload import assert_same, outcome
from harness.one_step import OneStep
from harness.pool import Ranks

from contract.run_folder import RunFolder, read_json_lines
from train.offload import activations
from train.offload.activations import Carrier

pytestmark = pytest.mark.slow

SLOW, CHAOS = pytest.mark.slow, pytest.mark.chaos
LAYOUTS = [
    (1, "precision=bf16"),
    (2, "precision=bf16 parallel.zero=3"),
    pytest.param(1, "precision=fp32 data.mask_documents=true model.kv_heads=4", marks=SLOW),
    pytest.param(
        2, "precision=bf16 parallel.zero=3 offload.optimizer=cpu offload.parameters=cpu", marks=SLOW
    ),
    pytest.param(2, "precision=fp32 parallel.zero=0", marks=SLOW),
    pytest.param(2, "precision=fp32 parallel.tp=2", marks=SLOW),
    pytest.param(2, "precision=bf16 parallel.tp=2 parallel.sequence_parallel=false", marks=SLOW),
    pytest.param(2, "precision=fp32 parallel.cp=2 parallel.zero=2", marks=SLOW),
    pytest.param(2, "precision=fp32 parallel.cp=2 parallel.zero=2 parallel.context=ring", marks=SLOW),
]
OFFLOAD = "offload.activations=cpu"


@pytest.mark.req("A10", "B9", "D7")
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=lambda value: str(value).replace(" ", ","))
def test_gradients_stay_and_the_device_is_freed_as_reckoned(ranks: Ranks, size: int, layout: str) -> None:
    modes = ("none", "full") if size == 1 else ("none", "selective", "full")

    def compare() -> None:
        for mode in modes:
            chosen = [*layout.split(), f"parallel.recompute={mode}"]
            here, there = OneStep(chosen), OneStep([*chosen, OFFLOAD])
            assert_same_step(there, here)
            carrier = there.sharded.carrier
            assert carrier is not None
            pool, on_host = carrier.pool, there.plan.host_bytes
            assert pool.held_bytes <= pool.limit_bytes and pool.held_bytes == pytest.approx(
                on_host, rel=0.05
            ), mode
            assert there.plan.kept_bytes == here.plan.kept_bytes - on_host
            little = 0.02 * here.plan.kept_bytes
            assert there.micro_batch()[0] == pytest.approx(there.plan.kept_bytes, abs=little), mode

    ranks(size, compare, timeout_s=120)


def assert_same_step(found: OneStep, expected: OneStep) -> None:
    """To the last bit."""
    assert found.loss == expected.loss
    gradients = expected.gradients()
    for name, gradient in found.gradients().items():
        assert torch.equal(gradient, gradients[name]), name


@pytest.mark.req("A10", "B9")
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, "pp=2 micro_batch_size=1"),
        pytest.param(2, "pp=2 micro_batch_size=1 schedule=zbv model.layers=4", marks=SLOW),
        pytest.param(2, "pp=2 micro_batch_size=1 schedule=interleaved_1f1b recompute=full", marks=CHAOS),
        pytest.param(4, "pp=2 tp=2 recompute=selective", marks=SLOW),
        pytest.param(4, "zero=3 tp=2", marks=CHAOS),
    ],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_runs_with_activations_on_the_host_are_the_same(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path, size: int, layout: str
) -> None:
    common = [one if "." in one.split("=")[0] else f"parallel.{one}" for one in layout.split()]
    expected = outcome(ranks, size, toy_tokens, tmp_path, "here", *common)
    found = outcome(ranks, size, toy_tokens, tmp_path, "there", *common, OFFLOAD)
    assert_same(found, expected, "activations")
    line = next(read_json_lines(RunFolder(tmp_path / "there").metrics))
    # There and back.
    # On a CPU nothing hides a copy.
    assert line["offload_activations_copies_s"] == line["offload_activations_exposed_s"] > 0
    assert line["offload_activations_moved_bytes"] >= 2 * line["offload_activations_host_bytes"] > 0


class Log(Carrier):
    """Notes which layer's memory is asked for, and which is used."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[tuple[str, int]] = []
        self._layer = 0
        self._layer_of: dict[int, int] = {}

    def send(self, storage: torch.UntypedStorage) -> torch.Tensor | None:
        host = super().send(storage)
        assert host is not None
        self._layer_of[host.data_ptr()] = self._layer % 4
        return host

    def settle(self, most: int = activations.OUTGOING) -> None:
        super().settle(most)
        if most:  # at the end of a layer
            self._layer += 1

    def fetch(self, host: torch.Tensor) -> Any:
        self.events.append(("ask", self._layer_of[host.data_ptr()]))
        return super().fetch(host)

    def wait(self, event: Any) -> None:
        super().wait(event)
        self.events.append(("use", -1))


@pytest.mark.req("A10")
@pytest.mark.parametrize("ahead", [1, 2])
def test_layers_come_back_ahead_of_their_backward(ranks: Ranks, ahead: int) -> None:
    def order() -> list[tuple[str, int]]:
        used = activations._Piece.get

        def get(piece: Any) -> Any:
            piece._carrier.events.append(("use", piece._carrier._layer_of[piece._host.data_ptr()]))
            return used(piece)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activations, "Carrier", Log)
            patch.setattr(activations._Piece, "get", get)
            step = OneStep(["precision=fp32", OFFLOAD, f"offload.prefetch_layers={ahead}"])
            assert isinstance(step.sharded.carrier, Log)
            return [event for event in step.sharded.carrier.events if event[1] >= 0]

    (events,) = ranks(1, order)
    asked: set[int] = set()
    over = False
    for kind, layer in events:
        if kind == "ask":
            asked = {layer} if over else asked | {layer}
        else:
            assert asked == set(range(max(0, layer - ahead), 4)), events
        # The first layer's use is the last of a micro-batch.
        over = kind == "use" and layer == 0


@pytest.mark.req("C6")
def test_what_the_pool_has_no_room_for_stays_on_the_device(ranks: Ranks) -> None:
    def small() -> str:
        here = OneStep(["precision=fp32"])
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(activations, "MARGIN", -0.5)
            there = OneStep(["precision=fp32", OFFLOAD])
        assert_same_step(there, here)
        carrier = there.sharded.carrier
        assert carrier is not None and 0 < carrier.pool.held_bytes <= carrier.pool.limit_bytes
        return out.getvalue()

    (said,) = ranks(1, small)
    assert said.count("activations are larger than was reckoned") == 1


@pytest.mark.req("A10")
def test_one_budget_for_what_is_kept_computed_again_and_moved(ranks: Ranks) -> None:
    def steps() -> list[tuple[int, int, str]]:
        here = OneStep(["precision=fp32"])
        found = []
        for budget_gb, link_gb_s in ((0.0025, 1e6), (0.0025, 1e-3), (0.0012, 1e6)):
            there = OneStep(
                [
                    "precision=fp32",
                    OFFLOAD,
                    "parallel.recompute=auto",
                    f"parallel.recompute_budget_gb={budget_gb}",
                    f"offload.link_gb_s={link_gb_s}",
                ]
            )
            assert_same_step(there, here)
            kept_bytes = there.micro_batch()[0]
            assert kept_bytes <= budget_gb * 1e9
            assert kept_bytes == pytest.approx(there.plan.kept_bytes, rel=0.02)
            found.append((kept_bytes, there.plan.host_bytes, str(there.plan)))
        return found

    ((fast, slow, least),) = ranks(1, steps, timeout_s=120)
    # Over a fast link everything goes there, and nothing is computed again; over a slow one nothing goes.
    assert "0% more compute" in fast[2] and fast[1] > 0
    assert slow[1] == 0 and "0% more compute" not in slow[2]
    assert least[1] > 0 and "on the host" in least[2]
