"""The planner's step time: exchanges and work against closed forms, and pipelines, and what must never be slower."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError
from tools.plan import links
from tools.plan.case import Attention, Case, Layout, Machine, Model, Number, Recompute
from tools.plan.constants import Constants, constants
from tools.plan.gpu import FOLDER, gpu
from tools.plan.pipeline.simulate import simulate
from tools.plan.step import layers_of_stages, predict_step
from tools.plan.work import head, layer
from train.config import load_config
from train.layout.dims import ParallelDims
from train.model.config import flops_per_token, parameter_count

GPT = Model(
    layers=24,
    hidden=2048,
    heads=16,
    kv_heads=16,
    ffn=8192,
    vocabulary=51200,
    gated=False,
    tied=True,
    biases=True,
)
LLAMA = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
EXACT = replace(
    Constants(),
    matmul=1.0,
    backward=1.0,
    waves=0.0,
    start=0.0,
    attention=1.0,
    misaligned=1.0,
    launch_s=0.0,
    sync_s=0.0,
    link=1.0,
    network=1.0,
    link_latency_s=0.0,
    network_latency_s=0.0,
    straggler=0.0,
    step_s=0.0,
    chunk_s=0.0,
    interference=0.0,
)
"""A machine without losses."""


def machine(gpus: int = 8, each: int = 8, network: float = 200e9, name: str = "a100_80") -> Machine:
    return Machine(gpu(name), gpus, each, network)


def case(
    model: Model = LLAMA, layout: Layout | None = None, sequence: int = 2048, each: int = 8, **more: object
) -> Case:
    layout = layout or Layout()
    return Case(model, machine(layout.ranks, each), layout, sequence, **more)  # type: ignore[arg-type]


@pytest.mark.req("A24")
def test_every_class_of_gpu_can_be_read() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert {"a100_40", "a100_64", "a100_80", "h100", "h200", "v100"} <= names
    for name in names:
        assert gpu(name).name == name and gpu(name).source


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("memory_gb: -1", "memory_gb=-1 must be a number above 0"),
        ("memory_gb: eighty", "memory_gb='eighty' must be a number above 0"),
        ("memory_gb: .nan", "memory_gb=nan must be a number above 0"),
        ("memory_gb: .inf", "memory_gb=inf must be a number above 0"),
        ("memory: 3", "does not describe a GPU"),
        ("[", "cannot be read"),
    ],
)
def test_a_file_that_is_no_gpu_is_refused(tmp_path: Path, change: str, sentence: str) -> None:
    text = (FOLDER / "a100_80.yaml").read_text().replace("memory_gb: 80", change)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        gpu(str(tmp_path / "mine.yaml"))
    for known, other, words in (
        ("name: a100_80", "name: 80", "name=80 must be a text"),
        ("idle_watts: 60", "idle_watts: 600", "idle_watts=600 is above watts=400"),
    ):
        text = (FOLDER / "a100_80.yaml").read_text().replace(known, other)
        (tmp_path / f"{other[:4]}.yaml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            gpu(str(tmp_path / f"{other[:4]}.yaml"))
    with pytest.raises(ConfigError, match="choose a100_40"):
        gpu("a1000")


@pytest.mark.req("A24")
@pytest.mark.parametrize("path", sorted((FOLDER.parent / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_parameters_and_work_are_those_of_the_trainer(path: Path) -> None:
    config = load_config([f"model={path.stem}"]).model
    config.vocab_size = config.vocab_size or 32000
    model = Model(
        config.layers,
        config.dim,
        config.heads,
        config.kv_heads or config.heads,
        config.ffn_dim,
        config.vocabulary,
        gated=True,
        tied=config.tie_embeddings,
    )
    assert model.parameters == parameter_count(config)
    assert math.isclose(model.flops_per_token(1024), flops_per_token(config, 1024))


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 8]),
)
def test_a_group_has_the_share_of_the_network_that_its_ranks_leave_each_other(
    tp: int, cp: int, dp: int, pp: int, each: int
) -> None:
    """Counted rank by rank, as the trainer places them."""
    assume(tp <= each)
    dims = ParallelDims(pp=pp, dp_replicate=1, dp_shard=dp, cp=cp, tp=tp)
    assume(dims.ranks % each == 0)
    where = machine(dims.ranks, each, 100e9)
    for axes, ranks, stride in ((("tp",), tp, 1), (("cp",), cp, tp), (("dp_shard", "cp"), dp * cp, tp)):
        found = links.group(where, EXACT, ranks, stride)
        members = dims.group(axes, 0)
        nodes = {rank // each for rank in members}
        if len(nodes) == 1:
            assert found.rate == where.gpu.link_gb_s * 1e9
            continue
        here = [rank for rank in members if rank < each]
        groups = {tuple(dims.group(axes, rank)) for rank in range(each)}
        assert len(here) * len(groups) == each
        assert math.isclose(found.rate, min(300e9, 100e9 / len(groups)))
        # A ring sends every piece but one's own once.
        assert math.isclose(found.gather_s(1e9), sum(1e9 / ranks / found.rate for _ in range(ranks - 1)))


@pytest.mark.parametrize("model", [GPT, LLAMA])
@pytest.mark.parametrize("tp", [1, 4])
def test_without_losses_matrix_units_do_the_model_s_arithmetic(model: Model, tp: int) -> None:
    one = case(model, Layout(tp=tp, micro_batch=4), attention=Attention.flash)
    endless = replace(EXACT, memory=1e9)
    found = layer(one, endless).times(model.layers) + head(one, endless)
    matrices = 6 * (model.layers * model.layer_matrices + model.table_parameters) * one.tokens / tp
    peak = 312e12
    padded = math.ceil(model.vocabulary / tp / 128) * 128 * tp / model.vocabulary
    assert 1 <= found.all.matmul_s * peak / matrices <= padded + 1e-9
    # The causal half of 4 s h a token and layer, 2.5 times that backward.
    attention = model.layers * one.tokens * 2 * one.sequence * model.hidden * 3.5 / tp
    assert math.isclose(found.all.attention_s * peak, attention)
    again = layer(
        replace(one, layout=replace(one.layout, recompute=Recompute.full), early_stop=False), endless
    ).again
    assert math.isclose(again.total_s, layer(one, endless).forward.total_s)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1, 2]))
def test_a_pipeline_of_equal_stages_idles_as_the_closed_form_says(
    p: int, v: int, rounds: int, tp: int
) -> None:
    m = rounds * p
    layout = Layout(tp=tp, pp=p, vpp=v, micro_batches=m, schedule="1f1b" if v == 1 else "interleaved_1f1b")
    # Next to no head: all stages are alike.
    one = case(replace(LLAMA, layers=2 * p * v, vocabulary=128), layout, each=p * tp)
    found = predict_step(one, EXACT)
    assert math.isclose(
        found.bubble_s
        / (found.compute_s + found.communication["tp"].exposed_s if tp > 1 else found.compute_s),
        (p - 1) / (v * m),
        rel_tol=0.02,
    )


@given(st.integers(2, 8), st.integers(1, 3), st.integers(-7, 6), st.integers(100, 300000))
@settings(deadline=None, max_examples=60)
def test_filling_is_what_playing_the_schedule_gives(p: int, v: int, rounds: int, vocabulary: int) -> None:
    """With a last stage that has a head of any size; interleaved with fewer micro-batches than ranks, too."""
    schedule = "1f1b" if v == 1 else "interleaved_1f1b"
    few = max(1, p + rounds) if v > 1 else p
    layout = Layout(pp=p, vpp=v, micro_batches=rounds * p if rounds > 0 else few, schedule=schedule)
    found = predict_step(case(replace(LLAMA, layers=2 * p * v, vocabulary=vocabulary), layout, each=p), EXACT)
    played = simulate(schedule, p, found.stages, layout.micro_batches, tolerance=0.0).total_s
    assert found.compute_s + found.bubble_s == pytest.approx(played, rel=1e-6 if v == 1 else 0.06)


@pytest.mark.req("A3")
def test_zero_bubble_schedules_are_faster_and_computing_again_takes_that_away() -> None:
    def bubble(schedule: str, recompute: Recompute = Recompute.none) -> float:
        v = 1 if schedule in ("1f1b", "zb_h1", "zb_2p") else 2
        layout = Layout(pp=8, vpp=v, micro_batches=32, schedule=schedule, recompute=recompute)
        found = predict_step(case(replace(LLAMA, layers=64, vocabulary=128), layout))
        return found.bubble_s / found.total_s

    assert bubble("zb_2p") < bubble("zb_h1") < bubble("1f1b")
    for schedule in ("zbv", "interleaved_zero_bubble", "dualpipev"):
        assert bubble(schedule) < 0.5 * bubble("1f1b") < bubble(schedule, Recompute.full)


def test_layers_are_dealt_evenly_and_the_ends_get_less() -> None:
    def dealt(layers: int, pp: int, **more: int) -> list[int]:
        return layers_of_stages(case(replace(LLAMA, layers=layers), Layout(pp=pp, micro_batches=pp, **more)))

    assert dealt(22, 8) == [2, 3, 3, 3, 3, 3, 3, 2]
    assert dealt(78, 12) == [6, 7, 7, 7, 7, 7, 7, 6, 6, 6, 6, 6]
    assert dealt(8, 2, vpp=2) == [2, 2, 2, 2]
    assert dealt(5, 1) == [5]


PARTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2, 8]),
        "micro_batch": st.sampled_from([1, 2, 4]),
        "micro_batches": st.sampled_from([4, 8, 16]),
        "zero": st.integers(0, 3),
        "recompute": st.sampled_from(Recompute),
        "sequence_parallel": st.booleans(),
    }
)


def _layout(parts: dict) -> Layout:
    return Layout(**parts, sharers=parts["dp"] * parts["cp"] if parts["zero"] else 1)


@given(PARTS, st.sampled_from([GPT, LLAMA]), st.sampled_from(list(Attention)), st.sampled_from(list(Number)))
def test_the_parts_make_up_the_whole_and_none_is_negative(
    parts: dict, model: Model, attention: Attention, number: Number
) -> None:
    one = case(model, _layout(parts), attention=attention, number=number)
    found = predict_step(one)
    whole = found.compute_s + found.exposed_s + found.bubble_s + found.optimizer_s + found.waiting_s
    assert math.isclose(found.total_s, whole)
    assert math.isclose(
        found.compute_s, found.matmul_s + found.attention_s + found.elementwise_s, rel_tol=1e-6
    )
    figures = [found.bubble_s, found.optimizer_s, found.waiting_s, found.recompute_s, found.handover_s]
    for lane in found.communication.values():
        figures += [lane.exposed_s, lane.hidden_s]
        assert lane.sent_bytes > 0
    assert min(figures) >= 0
    # No GPU does more than its maker says.
    peak = max(one.machine.gpu.bf16_tflops, one.machine.gpu.fp32_tflops) * 1e12
    assert one.model_flops / found.total_s < peak


@given(PARTS, st.sampled_from([GPT, LLAMA]))
def test_a_better_machine_is_never_slower(parts: dict, model: Model) -> None:
    one = case(model, _layout(parts))
    slow = predict_step(one).total_s
    for better in (
        replace(one.machine, network=2 * one.machine.network),
        replace(one.machine, gpu=replace(one.machine.gpu, link_gb_s=600)),
        replace(one.machine, gpu=replace(one.machine.gpu, bf16_tflops=624)),
        replace(one.machine, gpu=replace(one.machine.gpu, memory_gb_s=4000)),
    ):
        assert predict_step(replace(one, machine=better)).total_s <= slow * (1 + 1e-9)


@given(PARTS, st.sampled_from([GPT, LLAMA]))
def test_to_compute_again_costs_and_half_of_it_lies_between(parts: dict, model: Model) -> None:
    times = [
        predict_step(case(model, _layout(parts | {"recompute": recompute}))).total_s
        for recompute in (Recompute.none, Recompute.half, Recompute.full)
    ]
    assert times[0] < times[1] < times[2] < 1.5 * times[0]


def test_what_zero_sends_is_what_the_papers_say() -> None:
    """Rajbhandari et al. 2020: 2 (stages 0 to 2) or 3 (stage 3) times the parameters, again for micro-batches."""
    parameters = LLAMA.layers * LLAMA.layer_parameters + 2 * LLAMA.table_parameters
    for zero, wanted in ((0, 2), (1, 2), (2, 1 + 4), (3, 4 * 3)):
        layout = Layout(dp=8, zero=zero, sharers=8 if zero else 1, micro_batches=4)
        lanes = predict_step(case(layout=layout, gradient_bytes=2)).communication
        sent = sum(lanes[axis].sent_bytes for axis in ("dp", "copies") if axis in lanes)
        assert math.isclose(sent, wanted * 2 * parameters * 7 / 8)


def test_what_tensor_parallelism_sends_is_what_the_paper_says() -> None:
    """Narayanan et al. 2021: two all-reduces of 2 s b h bytes a layer each way, another two where it computes again."""
    for recompute, wanted in ((Recompute.none, 4), (Recompute.full, 6)):
        one = case(layout=Layout(tp=8, micro_batch=2, micro_batches=3, recompute=recompute))
        size = 2 * 2048 * 2 * LLAMA.hidden
        lane = predict_step(one).communication["tp"]
        assert math.isclose(lane.sent_bytes, 3 * LLAMA.layers * wanted * 2 * 7 / 8 * size)


def test_constants_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    assert constants() == constants()
    for text in ("{}", "[", '{"constants": {"matmul": 1}}'):
        path = tmp_path / f"{len(text)}.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match="plan calibrate"):
            constants(path)
