"""Context parallelism: attention that is split over ranks is attention on the whole sequence."""

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.pool import Ranks
from harness.toy import toy_overrides, train_toy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contract.errors import ConfigError
from train.config import TrainConfig
from train.data.loader import Batch
from train.layout.config import ContextMethod
from train.layout.dims import ParallelDims
from train.mesh import Mesh
from train.model.config import ModelConfig
from train.model.llama import CoreAttention, Llama, build, document_mask, next_token_loss
from train.parallel import context, ring
from train.parallel.context import HeadsAttention, part_of_sequence
from train.parallel.ring import RingAttention
from train.precision.config import Compute

pytestmark = pytest.mark.slow

HEADS, RING = ContextMethod.heads, ContextMethod.ring
MODEL = ModelConfig(
    name="toy", dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64, max_sequence_length=64
)


def attention_error(
    method: ContextMethod, heads: int, kv_heads: int, dtype: torch.dtype, documents: bool
) -> dict[str, float]:
    """Largest difference, over ranks, of the output and of each gradient to attention on the whole sequence."""
    rank, cp = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = (2, heads, 4 * 2 * cp, 16)
    query, d_out = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    key, value = (torch.randn((2, kv_heads, *shape[2:]), dtype=dtype) for _ in range(2))
    mask = document_mask(torch.arange(shape[2]).div(5).floor().expand(2, -1)) if documents else None

    whole = [x.double().requires_grad_() for x in (query, key, value)]
    key_of_each, value_of_each = (x.repeat_interleave(heads // kv_heads, 1) for x in whole[1:])
    expected = F.scaled_dot_product_attention(
        whole[0], key_of_each, value_of_each, attn_mask=mask, is_causal=mask is None
    )
    expected.backward(d_out.double())

    def own(x: Tensor) -> Tensor:
        return part_of_sequence(x.transpose(2, 3), method, rank, cp).transpose(2, 3)

    mesh = Mesh.build(ParallelDims(cp=cp), "cpu")
    core = RingAttention(mesh.group("cp")) if method is RING else HeadsAttention(CoreAttention(), mesh["cp"])
    parts = [own(x).contiguous().requires_grad_() for x in (query, key, value)]
    out = core(*parts, mask)
    assert out.dtype == dtype and out.shape == parts[0].shape
    out.backward(own(d_out))
    ours = [out, *(x.grad for x in parts)]
    theirs = [expected, *(x.grad for x in whole)]
    return {
        name: float((a.double() - own(b)).abs().max())
        for name, a, b in zip(("out", "query", "key", "value"), ours, theirs, strict=True)
    }


@pytest.mark.req("A9", "C5")
@pytest.mark.parametrize(
    ("cp", "method", "heads", "kv_heads", "dtype", "documents"),
    [
        (2, HEADS, 4, 4, torch.float32, False),
        (2, HEADS, 4, 2, torch.float32, True),
        (2, HEADS, 4, 1, torch.bfloat16, False),
        (3, HEADS, 12, 4, torch.float32, False),
        (3, HEADS, 12, 2, torch.float32, True),
        (4, HEADS, 8, 2, torch.float32, False),
        (2, RING, 4, 4, torch.float32, False),
        (2, RING, 4, 2, torch.bfloat16, False),
        (3, RING, 4, 1, torch.float32, False),
        (4, RING, 3, 1, torch.float32, False),
        (4, RING, 3, 3, torch.bfloat16, False),
    ],
)
def test_attention_over_ranks_is_attention_on_the_whole_sequence(
    ranks: Ranks,
    cp: int,
    method: ContextMethod,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    documents: bool,
) -> None:
    limit = 1e-5 if dtype == torch.float32 else 0.1
    for errors in ranks(cp, attention_error, method, heads, kv_heads, dtype, documents):
        assert all(error < limit for error in errors.values()), errors


def config_of(method: ContextMethod, cp: int) -> TrainConfig:
    """What context parallelism reads of a configuration."""
    config = TrainConfig(model=MODEL)
    config.parallel.context, config.parallel.cp = method, cp
    config.data.sequence_length = 48
    config.precision.compute = Compute.float32
    return config


def gradient_error(method: ContextMethod, how: str) -> float:
    """Largest relative difference of a parameter's gradient, averaged over ranks, to that of one process."""
    cp = dist.get_world_size()
    config = config_of(method, cp)
    torch.manual_seed(0)
    length = config.data.sequence_length
    tokens, targets = torch.randint(64, (2, 2, length)).unbind()
    documents = None if method is RING else torch.arange(length).div(7).floor().expand(2, -1)
    batch = Batch(tokens, targets, documents)
    whole = build(MODEL, 1, "cpu")
    next_token_loss(whole(tokens, documents), targets).backward()

    part, mesh = build(MODEL, 1, "cpu"), Mesh.build(ParallelDims(cp=cp), "cpu")
    context.shard(part, config, mesh)
    for layer in part.layers.values():
        if how == "recomputed":
            layer.forward = lambda *args, run=layer.forward: checkpoint(run, *args, use_reentrant=False)
        if how == "compiled":
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    context.give_positions(part, config, mesh, torch.device("cpu"))
    own = context.own_share(batch, config, mesh)
    next_token_loss(part(own.tokens, own.documents), own.targets).backward()
    worst = 0.0
    for ours, theirs in zip(part.parameters(), whole.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        worst = max(worst, float((ours.grad / cp - theirs.grad).norm() / theirs.grad.norm()))
    return worst


def bf16_errors() -> Tensor:
    """Squared errors (2, 4) of the ring's output and gradients on this rank, and of attention by one process.

    Both are in bf16, and compared with float64.
    """
    rank, cp = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 16 * cp, 16).bfloat16() for _ in range(4)]

    def own(x: Tensor) -> Tensor:
        return part_of_sequence(x.transpose(2, 3), RING, rank, cp).transpose(2, 3).contiguous()

    def run(core: CoreAttention, *tensors: Tensor) -> list[Tensor]:
        *inputs, d_out = (x.detach().requires_grad_() for x in tensors)
        out = core(*inputs, None)
        out.backward(d_out)
        return [out.detach(), *(x.grad for x in inputs)]

    exact, alone = (
        run(CoreAttention(), *(x.to(dtype) for x in inputs)) for dtype in (torch.float64, torch.bfloat16)
    )
    core = RingAttention(Mesh.build(ParallelDims(cp=cp), "cpu").group("cp"))
    around = run(core, *map(own, inputs))
    whole = zip(alone, exact, strict=True)
    return torch.tensor(
        [
            [(a.double() - own(b)).square().sum() for a, b in zip(around, exact, strict=True)],
            [own(a.double() - b).square().sum() for a, b in whole],
        ]
    )


@pytest.mark.req("A9", "C5")
def test_the_ring_adds_up_in_fp32_what_it_computes_in_bf16(ranks: Ranks) -> None:
    around, alone = sum(ranks(8, bf16_errors)).sqrt()
    # Each block's own result is rounded once more. Sums in bf16, of any of the four, are a third or more beyond.
    assert bool((around < 1.3 * alone).all()), around / alone


@pytest.mark.req("A9")
def test_the_compiler_is_told_right_what_the_ring_returns(ranks: Ranks) -> None:
    def check() -> None:
        name = Mesh.build(ParallelDims(cp=2), "cpu").group("cp").group_name
        # Heads next to each other, as projections leave them.
        query, key, value = (
            torch.randn(2, 8, heads, 16).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)
        )
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ring.ring_attention, (query, key, value, name), test_utils=tests)

    ranks(2, check)


@pytest.mark.req("A9", "C5")
@pytest.mark.parametrize("method", [HEADS, RING])
@pytest.mark.parametrize(("cp", "how"), [(2, "plain"), (4, "plain"), (2, "recomputed"), (2, "compiled")])
def test_gradients_of_a_model_are_those_of_one_process(
    ranks: Ranks, cp: int, method: ContextMethod, how: str
) -> None:
    assert max(ranks(cp, gradient_error, method, how, timeout_s=120)) < 2e-6


@given(st.sampled_from(ContextMethod), st.integers(1, 9), st.integers(1, 7), st.integers(1, 3), st.booleans())
def test_shares_of_all_ranks_are_the_batch(
    method: ContextMethod, cp: int, size: int, samples: int, masked: bool
) -> None:
    length = 2 * cp * size
    tokens = torch.arange(samples * length).reshape(samples, length)
    documents = tokens // 3 if masked else None
    batch = Batch(tokens, tokens + 1, documents)
    config = config_of(method, cp)
    shares = [context.own_share(batch, config, FakeMesh(cp, rank)) for rank in range(cp)]
    assert all(share.tokens.shape == (samples, length // cp) for share in shares)
    assert torch.equal(torch.cat([share.tokens for share in shares], 1).sort(1).values, tokens)
    assert all(torch.equal(share.targets, share.tokens + 1) for share in shares)
    assert all(share.documents is documents for share in shares)


class FakeMesh:
    """What `own_share` asks of a mesh, without ranks."""

    def __init__(self, cp: int, rank: int) -> None:
        self.dims, self._rank = ParallelDims(cp=cp), rank

    def coordinate(self, axis: str) -> int:
        return self._rank if axis == "cp" else 0


@given(st.integers(1, 16), st.integers(1, 9))
def test_the_ring_gives_every_rank_as_many_pairs_to_compute(cp: int, size: int) -> None:
    places = torch.arange(2 * cp * size)
    # A query at place p sees p + 1 keys.
    pairs = [int((part_of_sequence(places, RING, rank, cp) + 1).sum()) for rank in range(cp)]
    assert len(set(pairs)) == 1


def positions_seen(dims: ParallelDims, sequence_parallel: bool, given: Tensor | None) -> Tensor | None:
    """Positions that a part of a model is called with under a layout, `given` being passed by its caller."""
    config = config_of(HEADS, dims.cp)
    config.parallel.sequence_parallel = sequence_parallel
    part, seen = Llama(MODEL), {}
    part.forward = lambda tokens, documents=None, positions=None: seen.update(positions=positions)
    context.give_positions(part, config, Mesh.build(dims, "cpu"), torch.device("cpu"))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    part(tokens) if given is None else part(tokens, positions=given)
    return seen["positions"]


def test_a_part_learns_its_positions_where_it_cannot_see_them(ranks: Ranks) -> None:
    def look() -> None:
        rank = dist.get_rank()
        first_half = rank % 4 < 2
        assert positions_seen(ParallelDims(dp_shard=4), True, None) is None
        assert positions_seen(ParallelDims(pp=2, dp_shard=2), True, None) is None
        assert positions_seen(ParallelDims(pp=2, tp=2), False, None) is None
        assert torch.equal(positions_seen(ParallelDims(pp=2, tp=2), True, None), torch.arange(48))
        expected = torch.arange(0, 24) if first_half else torch.arange(24, 48)
        assert torch.equal(positions_seen(ParallelDims(cp=2, tp=2), True, None), expected)
        given = torch.arange(2)
        assert positions_seen(ParallelDims(cp=2, tp=2), True, given) is given

    ranks(4, look)


def test_a_run_with_a_shared_sequence_ends_with_a_sample(
    ranks: Ranks, toy_tokens: Path, tmp_path: Path
) -> None:
    overrides = toy_overrides(
        toy_tokens,
        tmp_path,
        "run",
        "loop.steps=1",
        "loop.eval_batches=1",
        "parallel.cp=2",
        "monitor.progress=auto",
    )

    def printed() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            train_toy(overrides)
        return stdout.getvalue()

    lines = ranks(2, printed)[0]
    assert "a sample that continues" in lines and "failed" not in lines


def test_the_operators_for_a_gpu_take_what_the_ring_gives_them() -> None:
    # Without a GPU their signatures can be tried, their numbers can't.
    query = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 12, 16, dtype=torch.bfloat16, device="meta")
    out, logsumexp = ring._attend(query, key, key, False)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (logsumexp.shape, logsumexp.dtype) == (query.shape[:3], torch.float32)
    gradients = ring._attend_backward(out, query, key, key, out, logsumexp, False)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.req("C5")
def test_a_rank_refuses_what_the_ring_cannot_compute_on_its_gpu() -> None:
    with torch.device("meta"):
        part = Llama(MODEL)
    mesh = SimpleNamespace(root=SimpleNamespace(device_type="cuda"))
    with pytest.raises(ConfigError, match="does not compute in fp32 on a GPU"):
        context.shard(part, config_of(RING, 2), mesh)
