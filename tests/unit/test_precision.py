"""Types of numbers by role: what goes together, and what each way of keeping numbers does to them."""

import math
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contract.errors import ConfigError
from train.config import load_config
from train.layout.check import lay_out
from train.model.llama import build
from train.optim.blocks import Blocks, code_values
from train.optim.compact import CompactAdamW
from train.precision.backward import compute_backward_in
from train.precision.config import BLOCK, SCALE_BYTES, Compute, PrecisionConfig
from train.precision.dynamic import HOLD, Dynamic, Noise
from train.precision.float8 import use_float8
from train.precision.policy import prepare_device
from train.precision.rows import Rows, hold_rows, pack, unpack
from train.precision.scale import LossScale

pytestmark = pytest.mark.req("C7", "A14")

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        ("precision=tf32 precision.compute=bfloat16", 1, "precision.tf32 changes products in fp32"),
        ("precision.float8=true precision.backward=float16", 1, "precision.float8 replaces"),
        ("precision.loss_scale=8", 1, "does nothing, for no product is computed in float16"),
        ("precision=fp16 precision.loss_scale=0.5", 1, "precision.loss_scale=0.5: must be from"),
        ("precision=fp16 precision.loss_scale_patience=0", 1, "precision.loss_scale_patience=0: must be"),
        ("precision.dynamic_steps=5", 1, "does nothing without precision.dynamic"),
        (
            "precision.dynamic=true precision.dynamic_steps=1",
            1,
            "precision.dynamic_steps=1: must be at least 2",
        ),
        (
            "precision.dynamic=true precision.accumulate=bfloat16 precision.reduce=bfloat16",
            1,
            "precision.dynamic moves between bfloat16 and",
        ),
        ("precision=fp16 precision.parameters=bfloat16", 1, "choose float32, or float16"),
        ("precision.embedding=int8 model.tie_embeddings=true", 1, "the same table would be the head"),
        (
            "precision.embedding=int8 offload.optimizer=cpu",
            1,
            "precision.embedding=int8 with offload.optimizer=cpu",
        ),
        (
            "precision.optimizer_state=int8 precision.parameters=bfloat16",
            1,
            "with precision.parameters=bfloat16",
        ),
        ("precision.dynamic=true offload.optimizer=cpu", 1, "precision.dynamic reads all moments"),
        (
            "precision.accumulate=float64 offload.optimizer=cpu offload.gradients=cpu",
            1,
            "offload.gradients=cpu adds gradients up in fp32",
        ),
        ("precision.embedding=int8 model.vocab_size=321 parallel.zero=1", 2, "set it to 322"),
        ("precision.float8=true parallel.tp=2", 2, "tensor parallelism here computes the products itself"),
        (
            "precision.reduce=bfloat16 parallel.zero=2 parallel.dp_replicate=2",
            4,
            "would add up micro-batches in it too",
        ),
    ],
)
def test_types_that_do_not_go_together_are_refused(overrides: str, ranks: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        lay_out(load_config(["parallel.micro_batch_size=1", *overrides.split()]), ranks)
    assert said in str(refused.value)


@pytest.mark.parametrize(("field", "said"), [("tf32", "choose precision=fp32"), ("float8", "leave it out")])
def test_what_only_gpus_have_is_refused_on_a_cpu(field: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare_device(PrecisionConfig(**{field: True}), CPU)


def test_float8_says_what_it_needs() -> None:
    with (
        patch.dict(sys.modules, {"torchao.float8": None}),
        pytest.raises(ConfigError, match="pip install torchao"),
    ):
        use_float8(nn.ModuleDict())


def test_float8_exchanges_the_products_of_the_layers_alone() -> None:
    config = load_config(["model=llama_1m", "model.vocab_size=512", "model.ffn_dim=360"])
    part = build(config.model, seed=None, device="meta")
    names = [name for name, _ in part.named_parameters()]
    use_float8(part.layers)
    assert [name for name, _ in part.named_parameters()] == names
    exchanged = {name for name, module in part.named_modules() if type(module).__name__ == "Float8Linear"}
    assert {name.split(".")[-1] for name in exchanged} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(exchanged) == 4 * config.model.layers


@pytest.mark.parametrize(
    ("name", "compute", "backward", "scales"),
    [
        ("fp32", "float32", None, False),
        ("tf32", "float32", None, False),
        ("bf16", "bfloat16", None, False),
        ("fp16", "float16", None, True),
        ("four_level", "bfloat16", "float16", True),
    ],
)
def test_named_choices(name: str, compute: str, backward: str | None, scales: bool) -> None:
    chosen = load_config([f"precision={name}"]).precision
    assert (chosen.name, chosen.compute, chosen.backward, chosen.scales_loss) == (
        name,
        compute,
        backward,
        scales,
    )


def scale_of(**settings: Any) -> LossScale:
    return LossScale.of(PrecisionConfig(compute=Compute.float16, **settings))


def test_the_scale_halves_with_each_overflow_and_doubles_after_enough_good_steps() -> None:
    scale = scale_of(loss_scale=64.0, loss_scale_growth_steps=3)
    seen = []
    for norm in (1.0, math.inf, math.nan, 1.0, 1.0, 1.0, 1.0, math.inf):
        seen.append((scale.passes(torch.tensor(norm)), scale.value))
    assert seen == [
        (True, 64),
        (False, 32),
        (False, 16),
        (True, 16),
        (True, 16),
        (True, 32),
        (True, 32),
        (False, 16),
    ]
    assert scale.skipped == 3 and scale.metrics() == {"loss_scale": 16.0, "skipped_steps": 3.0}


def test_the_scale_gives_up_after_overflows_in_a_row_at_its_lowest_only() -> None:
    scale = scale_of(loss_scale=2.0, loss_scale_patience=2)
    overflow, good = torch.tensor(math.inf), torch.tensor(1.0)
    for norm, exhausted in (
        (overflow, False),
        (overflow, False),
        (good, False),
        (overflow, False),
        (overflow, True),
    ):
        scale.passes(norm)
        assert scale.exhausted is exhausted
        assert scale.value == 1.0


def test_the_scale_continues_from_its_state_and_begins_anew_without() -> None:
    scale = scale_of(loss_scale=64.0)
    for norm in (math.inf, 1.0, math.inf, 1.0, 1.0):
        scale.passes(torch.tensor(norm))
    other = scale_of(loss_scale=64.0)
    other.load_state_dict({})
    assert other == scale_of(loss_scale=64.0)
    other.load_state_dict(scale.state_dict())
    assert other == scale


def test_without_float16_nothing_is_scaled_skipped_or_kept() -> None:
    scale = LossScale.of(PrecisionConfig())
    assert scale.value == 1.0 and scale.passes(torch.tensor(math.nan)) and scale.value == 1.0
    assert scale.state_dict() == {} and scale.metrics() == {}


@pytest.mark.req("B4")
def test_a_backward_is_computed_in_its_own_type() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 16, bias=False).bfloat16()
    x = torch.randn(2, 3, 24).bfloat16().requires_grad_()
    gradient = torch.randn(2, 3, 16).bfloat16()
    expected = linear(x)
    compute_backward_in(torch.float16, linear)
    linear.weight.grad_dtype = torch.float32
    out = linear(x)
    assert torch.equal(out, expected), "forward is what it was"
    out.backward(gradient)
    exact = gradient.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
    half = (gradient.half().flatten(0, 1).T @ x.detach().half().flatten(0, 1)).float()
    assert torch.equal(linear.weight.grad, half)
    # Products in bfloat16 would be off by up to 2^-9.
    assert (linear.weight.grad - exact).abs().max() < exact.abs().max() * 2**-10
    assert torch.equal(x.grad, (gradient.half() @ linear.weight.detach().half()).bfloat16())
    huge = torch.full_like(gradient, 1e6)
    linear.zero_grad()
    linear(x).backward(huge)
    assert not linear.weight.grad.isfinite().all(), "beyond float16's range there is nothing finite"


@pytest.mark.req("B4")
def test_a_table_in_int8_takes_a_quarter_of_its_bytes() -> None:
    plain = torch.randn(512, 1024)
    table = Rows.like(plain)
    table.replace_rows(0, plain)
    assert table.packed.untyped_storage().nbytes() == 512 * (1024 + SCALE_BYTES)
    assert 1 - table.packed.nbytes / plain.nbytes == pytest.approx(0.75, abs=0.001)
    steps = plain.abs().amax(1, keepdim=True) / 127
    assert ((table.decode() - plain).abs() <= steps * 0.502).all()


def test_a_table_looks_like_a_matrix_to_a_lookup_and_its_gradient() -> None:
    plain = torch.randn(10, 8)
    table = Rows.like(plain)
    table.copy_(plain)
    weight = nn.Parameter(table)
    tokens = torch.tensor([[1, 3], [3, 9]])
    rows = F.embedding(tokens, weight)
    assert torch.equal(rows, table.decode()[tokens]) and rows.dtype is torch.float32
    rows.sum().backward()
    assert weight.grad is not None and weight.grad.sum(1).tolist() == [0, 8, 0, 16, 0, 0, 0, 0, 0, 8]
    with pytest.raises(RuntimeError, match=r"a table held in int8 has no aten\.mm"):
        table @ plain.T


@given(seed=st.integers(0, 10**6), columns=st.integers(1, 40), power=st.integers(-30, 30))
@settings(max_examples=60, deadline=None)
def test_a_table_that_was_taken_out_goes_in_the_same(seed: int, columns: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20, columns, generator=generator) * 2.0**power
    values[0] = 0
    packed = pack(values, generator)
    assert torch.equal(pack(unpack(packed), None), packed)
    # On its grid nothing is rounded, at random or not.
    assert torch.equal(unpack(pack(unpack(packed), generator)), unpack(packed))


def test_rounding_at_random_is_right_on_average_where_rounding_to_the_nearest_stands_still() -> None:
    table = torch.linspace(-1, 1, 64)[None].repeat(4000, 1)
    step, generator = 1 / 127, torch.Generator().manual_seed(0)
    start = unpack(pack(table, None))
    moved = start + 0.1 * step
    moved[:, (0, -1)] = start[:, (0, -1)]  # the scale stays
    assert torch.equal(unpack(pack(moved, None)), start)
    average = unpack(pack(moved, generator)).mean(0) - start[0]
    error = 5 * step * math.sqrt(0.1 * 0.9 / 4000)
    assert (average[1:-1] - 0.1 * step).abs().max() < error
    assert torch.equal(average[[0, -1]], torch.zeros(2))


def updated(lr: float, steps: int) -> Tensor:
    """How far steps under a constant gradient take the values of a table held in int8, in the unit of `lr`."""
    config = load_config(
        [
            "model=llama_1m",
            "model.layers=1",
            "model.vocab_size=512",
            "precision.embedding=int8",
            f"optim.lr={lr}",
        ]
    )
    config.optim.weight_decay = 0.0
    part = build(config.model, seed=1, device="meta")
    assert part.embed_tokens is not None
    hold_rows(part.embed_tokens)
    part.to_empty(device="cpu")
    optimizer = CompactAdamW(nn.ModuleList([part]), config)
    optimizer.fill(lambda name, shape, where: torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    before = part.embed_tokens.weight.detach().decode()
    for _ in range(steps):
        for parameter in part.parameters():
            parameter.grad = torch.ones(parameter.shape)
        optimizer.step()
    return (part.embed_tokens.weight.detach().decode() - before) / lr


@pytest.mark.req("B4")
def test_updates_far_below_a_step_of_the_table_are_not_lost() -> None:
    # A step between two values is about 0.02.
    moved = updated(lr=2e-4, steps=20)
    assert moved.mean() == pytest.approx(-20, rel=0.1)
    assert (moved == 0).float().mean() > 0.5, "most values have stood still, some have jumped"
    assert moved.min() > -1000, "not always the same ones"


@pytest.mark.parametrize("signed", [True, False])
def test_moments_in_blocks_keep_two_digits_over_many_decades(signed: bool) -> None:
    values = code_values(signed)
    assert len(set(values)) == 256 and max(values) == 1 and (min(values) < 0) is signed
    torch.manual_seed(0)
    numbers = torch.randn(5 * BLOCK + 7) * torch.logspace(-3, 0, 5 * BLOCK + 7)
    numbers = numbers if signed else numbers**2
    blocks = Blocks(len(numbers), signed, CPU)
    assert torch.equal(blocks.read(0, len(numbers)), torch.zeros(len(numbers)))
    blocks.write(0, numbers)
    found = blocks.read(0, len(numbers))
    assert (found - numbers).norm() < 0.02 * numbers.norm()
    assert ((found == 0) == (numbers == 0)).all() or signed, (
        "a second moment of 0 would make updates infinite"
    )
    assert blocks.codes.nbytes + blocks.scale.nbytes == len(numbers) + 4 * 6
    again = Blocks(len(numbers), signed, CPU)
    again.write(0, found)
    assert torch.equal(again.codes, blocks.codes) and torch.equal(again.scale, blocks.scale)
    # In pieces it is the same.
    again.write(BLOCK, found[BLOCK : 2 * BLOCK])
    assert torch.equal(again.read(BLOCK, 3 * BLOCK), found[BLOCK : 3 * BLOCK])


@pytest.mark.parametrize("steps", [3, 10, 400])
def test_noise_of_samples_is_read_off_adams_moments(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    size, beta1, beta2 = 200_000, 0.9, 0.95
    mean = torch.randn(size, generator=generator)
    first, second = torch.zeros(size), torch.zeros(size)
    for _ in range(steps):
        gradient = mean + 3.0 * torch.randn(size, generator=generator)
        first.lerp_(gradient, 1 - beta1)
        second.lerp_(gradient**2, 1 - beta2)
    noise = Noise(steps, float(first.square().sum()), float(second.sum()))
    assert noise.relative(beta1, beta2) == pytest.approx(9.0, rel=0.1)


def dynamic_of(losses: list[float], **state: Any) -> Dynamic:
    """After so many intervals of two steps with these mean losses."""
    dynamic = Dynamic.of(PrecisionConfig(dynamic=True, dynamic_steps=2))
    for name, value in state.items():
        setattr(dynamic, name, value)
    for loss in losses:
        dynamic.observe(loss - 0.001)
        dynamic.observe(loss + 0.001)
        dynamic.look(noise=1.0, additions=4, skipped=dynamic.skipped)
    return dynamic


def test_gradients_are_narrow_while_the_samples_noise_is_far_above_that_of_rounding() -> None:
    dynamic = dynamic_of([5.0])
    assert dynamic.narrow and dynamic.types.accumulate == dynamic.types.reduce == "bfloat16"
    reason = dynamic.look(noise=1e-3, additions=4, skipped=0)
    assert reason is not None and "below" in reason and not dynamic.narrow
    assert dynamic.types.accumulate == "float32" and dynamic.switches == 2


def test_gradients_stay_wide_for_a_while_after_an_overflow() -> None:
    dynamic = dynamic_of([5.0])
    said = [dynamic.look(1.0, 4, skipped=2) for _ in range(HOLD + 1)]
    assert said[0] == "2 gradients have overflowed" and said[1:-1] == [None] * (HOLD - 1)
    assert said[-1] is not None and dynamic.narrow


@pytest.mark.parametrize(
    ("losses", "narrow"),
    [
        ([5.0, 4.0, 3.5], True),  # falls, ever more slowly
        ([5.0, 4.0, 4.0], True),
        ([5.0, 4.0, 4.2], False),  # rises after it fell
        ([4.0, 4.1, 4.5], False),  # rises ever faster
        ([4.0, 4.4, 4.5], True),  # rises, and comes to rest
        ([5.0, 4.0, 4.0005], False),  # the noise of the losses is less
    ],
)
def test_gradients_are_wide_when_the_loss_bends_up(losses: list[float], narrow: bool) -> None:
    assert dynamic_of(losses).narrow is narrow


def test_noisy_losses_do_not_count_as_a_bend() -> None:
    dynamic = Dynamic.of(PrecisionConfig(dynamic=True, dynamic_steps=2))
    for loss in (4.1, 4.0, 4.05):
        dynamic.observe(loss - 0.5)
        dynamic.observe(loss + 0.5)
        dynamic.look(1.0, 4, 0)
    assert dynamic.narrow


def test_the_choice_of_types_continues_from_its_state() -> None:
    dynamic = dynamic_of([5.0, 4.0, 4.2])
    dynamic.observe(4.3)
    other = Dynamic.of(dynamic.config)
    other.load_state_dict({})
    assert other == Dynamic.of(dynamic.config)
    other.load_state_dict(dynamic.state_dict())
    assert other == dynamic
