"""Our configuration and a machine's profile as a case of the planner."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.compose import FOLDER, choices, load
from contract.errors import ConfigError
from slurm.sites.profile import Profile
from tools.plan.case import Number, Recompute
from tools.plan.own import case_of, gpu_of, machine_of, model_of, number_of, varied
from train.config import TrainConfig, load_config
from train.layout.check import lay_out
from train.layout.config import ParallelConfig
from train.model.config import flops_per_token, parameter_count
from train.precision.config import Compute, PrecisionConfig

SITES = [
    name
    for name in choices("cluster")
    if load(FOLDER / "cluster" / f"{name}.yaml", Profile).gpus_per_node and name not in ("slurm", "a100_ib")
]


def config_of(*overrides: str) -> TrainConfig:
    return load_config(["data.sequence_length=2048", "loop.global_batch_size=64", *overrides])


@pytest.mark.req("A24")
@pytest.mark.parametrize("name", ["llama_1b", "deepseek_7b", "deepseek_67b", "gpt3_175b", "gpt_1t"])
def test_a_model_has_the_trainers_parameters_and_flops(name: str) -> None:
    model = load_config([f"model={name}"]).model
    ours = model_of(model)
    assert ours.parameters == parameter_count(model)
    assert math.isclose(ours.flops_per_token(2048), flops_per_token(model, 2048))


def test_a_tied_model_counts_its_table_once() -> None:
    model = load_config(["model=llama_125m", "model.vocab_size=50304"]).model
    assert model_of(model).parameters == parameter_count(model)


@pytest.mark.req("A24", "C3")
@pytest.mark.parametrize("name", SITES)
def test_every_site_is_a_machine(name: str) -> None:
    profile = load(FOLDER / "cluster" / f"{name}.yaml", Profile)
    machine = machine_of(profile, 3, profile.gpus_per_node)
    assert machine.gpus == 3 * profile.gpus_per_node
    assert profile.gpu_memory_gb is not None
    # Sizes as makers write them.
    assert machine.gpu.memory_gb == profile.gpu_memory_gb
    assert machine.network_known == (profile.nics_per_node is not None)
    # Nobody builds a node with less than 25 or more than 400 Gb/s for each GPU of this age.
    assert 25e9 <= machine.network * 8 / profile.gpus_per_node <= 400e9


def test_gpus_are_told_apart_by_what_a_system_says_of_them() -> None:
    assert gpu_of(Profile(gpu_model="NVIDIA A100-SXM4-80GB", gpu_memory_gb=85)).name == "a100_80"
    assert gpu_of(Profile(gpu_model="NVIDIA A100", gpu_memory_gb=42)).name == "a100_40"
    assert gpu_of(Profile(gpu_model="NVIDIA H100 80GB HBM3")).name == "h100"
    assert gpu_of(Profile(gpu_model="NVIDIA A100", gpu="v100")).name == "v100"
    with pytest.raises(ConfigError, match=r"which A100.*cluster.gpu="):
        gpu_of(Profile(name="x", gpu_model="NVIDIA A100"))
    with pytest.raises(ConfigError, match=r"no GPU.*cluster.gpu="):
        gpu_of(Profile(name="x"))
    with pytest.raises(ConfigError, match="no such class"):
        gpu_of(Profile(gpu="b300"))


def test_an_unknown_network_is_assumed_and_that_is_said() -> None:
    profile = Profile(gpu="h100", gpus_per_node=8)
    machine = machine_of(profile, 2, 8)
    assert not machine.network_known
    assert machine.network == 8 * machine.gpu.adapter_gbit * 1e9 / 8
    known = machine_of(Profile(gpu="h100", gpus_per_node=8, nics_per_node=2, nic_gbit=100), 2, 8)
    assert known.network_known and known.network == 25e9
    for nics, gbit in ((0, 100), (1, math.nan), (1, math.inf)):
        with pytest.raises(ConfigError, match="make no network"):
            machine_of(Profile(gpu="h100", nics_per_node=nics, nic_gbit=gbit), 2, 8)


@pytest.mark.req("A24", "B1")
def test_a_layout_comes_out_as_it_is() -> None:
    config = config_of(
        "model=llama_1b", "parallel.tp=2", "parallel.pp=4", "parallel.zero=1", "parallel.dp_replicate=2"
    )
    config.parallel.schedule, config.parallel.micro_batch_size = "interleaved_1f1b", 2
    profile = load(FOLDER / "cluster" / "azure_ndv4.yaml", Profile)
    dims = lay_out(config, 32, 8)
    case = case_of(config, dims, machine_of(profile, 4, 8))
    layout = case.layout
    assert (layout.tp, layout.pp, layout.cp, layout.dp, layout.vpp) == (2, 4, 1, 4, 2)
    assert (layout.zero, layout.sharers, layout.schedule) == (1, 2, "interleaved_1f1b")
    assert case.samples == 64 and layout.micro_batches == 8
    assert layout.sequence_parallel and not layout.offload_optimizer
    assert layout.split is not None and sum(layout.split) == 22 and len(layout.split) == 8
    assert case.gradient_bytes == 4


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("none", Recompute.none), ("selective", Recompute.between), ("full", Recompute.full)],
)
def test_recompute_by_its_name_and_by_a_budget(chosen: str, expected: Recompute) -> None:
    profile = Profile(gpu="a100_80", gpus_per_node=8)
    config = config_of("model=llama_1b", "parallel.micro_batch_size=8", f"parallel.recompute={chosen}")
    dims = lay_out(config, 8, 8)
    assert case_of(config, dims, machine_of(profile, 1, 8)).layout.recompute is expected
    # A budget of little more than that choice keeps comes to the same.
    from train.layout.recompute import plan

    budget = plan(config, dims, 0, 1).kept_bytes / 1e9
    by_budget = config_of(
        "model=llama_1b",
        "parallel.micro_batch_size=8",
        "parallel.recompute=auto",
        f"parallel.recompute_budget_gb={budget * 1.04}",
    )
    assert (
        case_of(by_budget, lay_out(by_budget, 8, 8), machine_of(profile, 1, 8)).layout.recompute is expected
    )


def test_numbers() -> None:
    assert number_of(PrecisionConfig()) is Number.bf16
    assert number_of(PrecisionConfig(compute=Compute.float16)) is Number.fp16
    assert number_of(PrecisionConfig(compute=Compute.float32)) is Number.fp32
    assert number_of(PrecisionConfig(compute=Compute.float32, tf32=True)) is Number.tf32
    assert number_of(PrecisionConfig(float8=True)) is Number.fp8


@given(st.integers(1, 64))
@settings(max_examples=20)
def test_a_variation_leaves_the_original(samples: int) -> None:
    config = TrainConfig()
    changed = varied(config, parallel=ParallelConfig(tp=2))
    changed.loop.global_batch_size = samples + 100
    assert config.parallel.tp == 1 and config.loop.global_batch_size == 16
