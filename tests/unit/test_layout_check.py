"""Layouts that cannot work are refused with the nearest that can; those that are unfortunate get a note."""

import copy
import dataclasses
import functools
import re
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.config import TrainConfig, load_config
from train.layout.check import lay_out
from train.layout.config import ContextMethod, ParallelConfig, Recompute
from train.layout.notes import notes
from train.layout.stages import SCHEDULES

MODEL = [
    "model.heads=8",
    "model.kv_heads=2",
    "model.dim=128",
    "model.layers=6",
    "data.sequence_length=64",
    "loop.global_batch_size=32",
    "parallel.micro_batch_size=2",
]


@functools.cache
def model() -> TrainConfig:
    """Composed once: that takes longer than all that is done with it."""
    return load_config(MODEL)


def refusal(overrides: list[str], ranks: int, ranks_per_node: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        lay_out(load_config([*MODEL, *overrides]), ranks, ranks_per_node)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.req("C5")
@pytest.mark.parametrize(
    ("overrides", "ranks", "sentence"),
    [
        ("tp=3", 8, "tp=3 x pp=1 x cp=1 is 3, which does not divide 8 ranks"),
        ("tp=4 dp=4", 8, "is 16 ranks, but there are 8"),
        ("dp_replicate=3 zero=1", 8, "do not make up the 8 data-parallel ranks"),
        ("tp=16", 16, "parallel.tp=16 does not divide model.heads=8"),
        ("tp=3 model.heads=6 model.dim=96", 3, "tp=3 neither divides model.kv_heads=2 nor is a multiple"),
        ("micro_batch_size=8", 8, "loop.global_batch_size=32 does not divide over 8 data-parallel ranks"),
        ("gradient_accumulation_steps=4 loop.global_batch_size=32", 8, "makes 64 samples a step"),
        ("cp=4 tp=4", 16, "shares 2 heads (model.heads=8 / parallel.tp=4), which it does not divide"),
        ("cp=3 context=ring", 3, "context=ring cuts a sequence into 6 equal parts"),
        ("cp=4 data.sequence_length=66", 4, "context=heads cuts a sequence into 4 equal parts"),
        ("tp=4 data.sequence_length=66", 4, "parallel.sequence_parallel splits 66 positions"),
        ("tp=4 cp=2 data.sequence_length=60 context=ring", 8, "sequence_parallel splits 30 positions"),
        ("cp=2 context=ring data.mask_documents=true", 2, "context=ring has no document masks"),
        ("pp=16 schedule=gpipe", 16, "too many for model.layers=6"),
        ("pp=2 micro_batch_size=32", 2, "schedule=1f1b with pp=2 needs at least 2 micro-batches"),
        ("pp=2 schedule=zbv zero=3 dp=2", 4, "which zero=3 gets wrong"),
        ("pp=2 schedule=dualpipev zero=3 dp=2", 4, "which zero=3 gets wrong"),
        ("pp=2 schedule=interleaved_zero_bubble zero=3 dp=2", 4, "which zero=3 gets wrong"),
        ("schedule=gpipe", 2, "parallel.schedule=gpipe does nothing with parallel.pp=1"),
        ("split=[6]", 2, "parallel.split does nothing with parallel.pp=1"),
        ("stages_per_rank=2", 2, "parallel.stages_per_rank does nothing with parallel.pp=1"),
        ("context=ring", 2, "parallel.context=ring does nothing with parallel.cp=1"),
        ("sequence_parallel=false", 2, "parallel.sequence_parallel=false does nothing with parallel.tp=1"),
        ("loss_parallel=false", 2, "parallel.loss_parallel=false does nothing with parallel.tp=1"),
        ("dp_shard=2", 2, "dp_shard=2 has nothing to share with parallel.zero=0"),
        ("dp_replicate=2", 4, "dp_replicate=2 leaves 2 ranks that share the state, which parallel.zero=0"),
        ("recompute=auto", 2, "give parallel.recompute_budget_gb"),
        ("recompute_budget_gb=2", 2, "recompute_budget_gb=2.0 does nothing with parallel.recompute=none"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(overrides: str, ranks: int, sentence: str) -> None:
    assert sentence in refusal(settings(overrides), ranks)


def settings(text: str) -> list[str]:
    return [one if "." in one.split("=")[0] else f"parallel.{one}" for one in text.split()]


@pytest.mark.req("C5")
@pytest.mark.parametrize(
    ("overrides", "ranks", "tail"),
    [
        ("tp=3", 8, "; possible: parallel.tp=4, or parallel.tp=2, or parallel.tp=8"),
        # Two nodes of 8: tp=16 is as near as any, but spans them.
        ("tp=16", 16, "; possible: parallel.tp=8, or parallel.tp=4, or parallel.tp=8 parallel.pp=2"),
        (
            "dp=4 tp=4 pp=2",
            16,
            "; possible: parallel.dp=4 parallel.tp=2 parallel.pp=2, or parallel.dp=4 parallel.tp=4 parallel.pp=1, or "
            "parallel.dp=2 parallel.tp=4 parallel.pp=2; unchanged it works on 32 ranks",
        ),
        # The batch allows no layout of 7 ranks, and of other batches the refusal tells already.
        (
            "micro_batch_size=2 model.layers=2",
            7,
            "set it to 28 or 42, or change the micro-batch size; unchanged it works on 4 or 8 ranks",
        ),
        (
            "tp=3 loop.global_batch_size=8",
            16,
            "; possible: parallel.tp=4, or parallel.tp=8, or parallel.tp=4 parallel.pp=2",
        ),
        (
            "tp=3 micro_batch_size=32",
            16,
            "; possible: parallel.tp=4 loop.global_batch_size=128, or parallel.tp=2 loop.global_batch_size=256, or "
            "parallel.tp=8 loop.global_batch_size=64",
        ),
    ],
)
def test_the_nearest_layouts_are_named(overrides: str, ranks: int, tail: str) -> None:
    assert refusal(settings(overrides), ranks).endswith(tail)


@pytest.mark.req("A5", "C5")
def test_layouts_whose_tensor_parallelism_stays_in_a_node_are_named_first() -> None:
    assert "; possible: parallel.tp=4, or" in refusal(["parallel.tp=16"], 16, ranks_per_node=4)


@pytest.mark.req("C5")
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("cp=2 context=ring precision=fp32", "does not compute in fp32 on a GPU: choose precision=bf16"),
        ("cp=2 context=ring model.dim=96", "model.dim / model.heads is 12: change model.heads"),
        ("cp=2 context=ring model.dim=2112", "model.dim / model.heads is 264: change model.heads"),
        ("cp=2 context=ring", None),
        ("cp=2 precision=fp32 model.dim=96", None),
    ],
)
def test_what_computes_on_a_cpu_alone_is_refused_where_gpus_are_known(
    overrides: str, sentence: str | None
) -> None:
    plain = [one if one.startswith("precision") else settings(one)[0] for one in overrides.split()]
    config = load_config([*[one for one in MODEL if one.split("=")[0] not in overrides], *plain])
    lay_out(config, 2)
    with nullcontext() if sentence is None else pytest.raises(ConfigError, match=re.escape(sentence or "")):
        lay_out(config, 2, on_gpus=True)


PARALLEL = st.builds(
    ParallelConfig,
    micro_batch_size=st.sampled_from([1, 2, 3, 4, 8]),
    gradient_accumulation_steps=st.sampled_from([None, None, 1, 2, 4, 6]),
    dp=st.sampled_from([None, None, 1, 2, 4]),
    dp_replicate=st.sampled_from([None, None, 1, 2]),
    dp_shard=st.sampled_from([None, None, 1, 2]),
    tp=st.sampled_from([1, 1, 2, 3, 4, 8]),
    pp=st.sampled_from([1, 1, 2, 3, 4, 8]),
    cp=st.sampled_from([1, 1, 2, 3, 4]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(["1f1b", *SCHEDULES, "none"]),
    stages_per_rank=st.sampled_from([None, None, 1, 2, 3]),
    split=st.sampled_from([None, None, [3, 3], [1, 2, 2, 1]]),
    context=st.sampled_from(ContextMethod),
    recompute=st.sampled_from(Recompute),
    recompute_budget_gb=st.sampled_from([None, None, 1.0]),
)


@pytest.mark.req("C5", "B1")
@given(
    parallel=PARALLEL,
    ranks=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 16, 64, 96, 4096]),
    ranks_per_node=st.sampled_from([1, 4, 8]),
    batch=st.sampled_from([None, 1, 8, 12, 32, 4096]),
    heads=st.sampled_from([(8, 2), (8, None), (6, 3), (1, 1)]),
    length=st.sampled_from([64, 60, 7]),
    masks=st.booleans(),
    sensible=st.sampled_from([True, True, True, False]),
)
def test_nothing_but_a_refusal_is_raised_and_what_it_offers_works(
    parallel: ParallelConfig,
    ranks: int,
    ranks_per_node: int,
    batch: int | None,
    heads: tuple[int, int | None],
    length: int,
    masks: bool,
    sensible: bool,
) -> None:
    if sensible:
        parallel = _sensible(parallel)
    config = copy.deepcopy(model())
    config.parallel = parallel
    config.model.heads, config.model.kv_heads = heads
    config.data.sequence_length, config.data.mask_documents = length, masks
    if batch is None and parallel.gradient_accumulation_steps is None:
        batch = 16
    config.loop.global_batch_size = batch
    try:
        dims = lay_out(config, ranks, ranks_per_node)
    except ConfigError as error:
        _, _, offers = str(error).partition("; possible: ")
        layouts, _, counts = offers.partition("; unchanged it works on ")
        for offer in filter(None, layouts.split(", or ")):
            _give(config, parallel, offer, batch)
            assert lay_out(config, ranks, ranks_per_node).ranks == ranks
        config.parallel, config.loop.global_batch_size = parallel, batch
        for count in re.findall(r"\d+", counts):
            config.loop.global_batch_size = batch
            assert lay_out(config, int(count), ranks_per_node).ranks == int(count)
        return
    assert dims.ranks == ranks
    assert config.loop.samples_per_step % (parallel.micro_batch_size * dims.dp) == 0
    for note in notes(config, dims, ranks_per_node):
        offered = re.search(r": ((?:parallel\.\w+=\d+ ?)+)would", note)
        if offered:
            _give(config, parallel, offered[1].strip(), batch)
            better = lay_out(config, ranks, ranks_per_node)
            assert not better.spans_nodes("tp", ranks_per_node)


def _sensible(parallel: ParallelConfig) -> ParallelConfig:
    """Without most of what is refused in any layout, which few random choices are free of."""
    parallel = dataclasses.replace(parallel, recompute=Recompute.none, recompute_budget_gb=None, split=None)
    if parallel.pp == 1 or parallel.schedule not in SCHEDULES:
        parallel.schedule = "1f1b"
    if parallel.pp == 1 or parallel.stages_per_rank != 2:
        parallel.stages_per_rank = None
    if parallel.cp == 1:
        parallel.context = ContextMethod.heads
    if parallel.tp == 1:
        parallel.sequence_parallel = parallel.loss_parallel = True
    if parallel.zero == 0:
        parallel.dp_shard = None
    return parallel


def _give(config: TrainConfig, parallel: ParallelConfig, offer: str, batch: int | None) -> None:
    """Set what an offer says, with the rest as it was."""
    values = {
        key.partition(".")[2]: int(value) for key, _, value in (one.partition("=") for one in offer.split())
    }
    config.loop.global_batch_size = values.pop("global_batch_size", batch)
    config.parallel = dataclasses.replace(parallel, **values)


@pytest.mark.req("A5")
@pytest.mark.parametrize(
    ("overrides", "ranks", "ranks_per_node", "note"),
    [
        ("tp=8 dp=4", 32, 8, None),
        ("tp=8", 16, 4, "parallel.tp=8 spans nodes of 4 ranks, so that each layer waits for the network"),
        ("tp=4", 12, 6, ": parallel.tp=2"),
        ("cp=4 tp=4 context=ring", 16, 8, "parallel.cp=4 with parallel.tp=4 spans nodes of 8 ranks"),
        ("cp=2 tp=4", 16, 8, None),
        ("zero=3", 16, 8, None),
        ("zero=3 dp_replicate=2", 16, 8, None),
        ("zero=3 dp_replicate=2 tp=2", 32, 4, "parallel.dp_replicate=8 would keep each copy inside a node"),
        ("zero=3 dp_replicate=4 tp=4", 32, 4, None),
        ("zero=2", 1, 8, "parallel.zero=2 shares nothing"),
        ("zero=2 tp=2", 2, 8, "parallel.zero=2 shares nothing"),
        ("zero=2 cp=2", 2, 8, None),
    ],
)
def test_a_layout_that_sends_across_nodes_what_it_need_not_is_noted(
    overrides: str, ranks: int, ranks_per_node: int, note: str | None
) -> None:
    own = ["loop.global_batch_size=96", "model.kv_heads=8", *settings(overrides)]
    config = load_config([one for one in [*MODEL, *own] if one != "loop.global_batch_size=32"])
    found = notes(config, lay_out(config, ranks, ranks_per_node), ranks_per_node)
    assert len(found) == (note is not None), found
    assert note is None or note in found[0]
