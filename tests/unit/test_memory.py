"""What a rank keeps where: against the sums over all ranks, the budget, and what a node has."""

import copy
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, NodeError
from train.config import TrainConfig, load_config
from train.layout.check import lay_out
from train.layout.holding import holdings, units
from train.layout.memory import OFFLOADED, Bytes, Role, heaviest, lines, memory, total
from train.model.config import parameter_count
from train.offload.room import Room, check_fits, host_memory

SHAPE = ["model.vocab_size=256", "loop.global_batch_size=null", "parallel.gradient_accumulation_steps=4"]
NVME = "offload.nvme_path=[/local/disk]"
GB = 10**9


def config_of(*more: str) -> TrainConfig:
    return load_config([*SHAPE, *more])


@functools.cache
def base() -> TrainConfig:
    """A model of which tests change parts: composing takes longer than all the rest."""
    return config_of("model.dim=64", "model.heads=4", "model.kv_heads=4", "model.layers=4")


@pytest.mark.req("C6")
@given(
    shard=st.integers(1, 9),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    zero=st.integers(1, 3),
    ffn_dim=st.integers(1, 40).map(lambda number: 8 * number),
    vocabulary=st.integers(60, 300),
)
def test_the_ranks_of_a_layout_share_a_model_without_a_rest(
    shard: int, tp: int, pp: int, zero: int, ffn_dim: int, vocabulary: int
) -> None:
    """Weights and moments of all ranks are those of the model, but for what tensor parallelism has on each rank."""
    config = copy.deepcopy(base())
    config.parallel = replace(config.parallel, tp=tp, pp=pp, zero=zero)
    config.model = replace(config.model, ffn_dim=ffn_dim, vocab_size=vocabulary // tp * tp)
    dims = lay_out(config, shard * tp * pp)
    ranks = [memory(config, dims, rank, "cuda") for rank in range(dims.ranks)]
    weights = sum(one[Role.parameters].device for one in ranks)
    copies_of_norms = (2 * config.model.layers + 1) * 64 * (tp - 1)
    assert weights == 4 * (parameter_count(config.model) + copies_of_norms)
    assert sum(one[Role.optimizer].device for one in ranks) == 2 * weights


@pytest.mark.req("C6")
def test_zero_cuts_columns_where_tensor_parallelism_cuts_rows_unevenly() -> None:
    config = config_of("parallel.tp=2", "parallel.zero=1", "model.vocab_size=257", "model.dim=64")
    dims = lay_out(config, 8)
    for holding in holdings(config, dims, range(8)):
        (table, *_) = units(config, dims, holding.stages[0], holding.coordinates["tp"])
        assert table.is_table
        assert table.shares(4, 3) == [holding.vocabulary * 16]


@pytest.mark.req("C6")
def test_what_is_offloaded_leaves_the_device() -> None:
    def kept(*more: str) -> dict[Role, Bytes]:
        config = config_of("parallel.zero=3", "precision.parameters=bfloat16", *more)
        return memory(config, lay_out(config, 4), 0, "cpu")

    here = kept()
    parameters = here[Role.parameters].device // 2
    assert here[Role.optimizer] == Bytes(device=12 * parameters)
    for optimizer, weights, gradients in [
        ("cpu", "none", "cpu"),
        ("nvme", "none", "none"),
        ("nvme", "cpu", "cpu"),
        ("cpu", "nvme", "none"),
    ]:
        there = kept(
            f"offload.optimizer={optimizer}",
            f"offload.parameters={weights}",
            f"offload.gradients={gradients}",
            *[NVME] * ("nvme" in (optimizer, weights)),
        )
        names = {"none": "device", "cpu": "host", "nvme": "nvme"}
        assert there[Role.optimizer] == Bytes(**{names[optimizer]: 12 * parameters})
        assert there[Role.gradients] == Bytes(**{names[gradients]: 4 * parameters})
        # Blocks on a shelf begin at pages.
        found = getattr(there[Role.parameters], names[weights])
        assert 2 * parameters <= found < 2 * parameters + 20 * 4096
        assert there[Role.parameters].total == found
        assert there[Role.activations] == here[Role.activations]


@pytest.mark.req("C6")
def test_buffers_for_disks_do_not_grow_with_the_model() -> None:
    def buffers(layers: int) -> int:
        config = config_of(
            "parallel.zero=3",
            f"model.layers={layers}",
            "offload.optimizer=nvme",
            "offload.parameters=nvme",
            NVME,
        )
        return memory(config, lay_out(config, 2), 0, "cuda")[Role.under_way].host

    assert 0 < buffers(8) == buffers(80)


@pytest.mark.req("C6")
def test_a_budget_that_is_too_small_is_refused_with_what_there_is_to_do() -> None:
    overrides = ["parallel.zero=3", "model=llama_25m", "model.vocab_size=8192", "offload.optimizer=cpu"]
    need = (
        total(memory(config_of(*overrides), lay_out(config_of(*overrides), 2), 0, "cpu"), OFFLOADED).host / GB
    )
    assert lay_out(config_of(*overrides, f"offload.host_budget_gb={1.01 * need}"), 2).dp == 2
    small = f"offload.host_budget_gb={0.7 * need}"
    with pytest.raises(
        ConfigError, match=r"rank 0 needs .*optimizer state.*offload.optimizer=nvme"
    ) as refused:
        lay_out(config_of(*overrides, small), 2)
    (said,) = re.findall(r"needs ([\d.e-]+) GB", str(refused.value))
    assert lay_out(config_of(*overrides, f"offload.host_budget_gb={said}"), 2).dp == 2
    # With the states on disks the same budget is enough.
    assert lay_out(config_of(*overrides[:-1], "offload.optimizer=nvme", NVME, small), 2).dp == 2
    with pytest.raises(ConfigError, match=r"host_budget_gb=1 limits what offloading takes, and nothing is"):
        lay_out(config_of("offload.host_budget_gb=1"), 1)


@pytest.mark.req("C6")
@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ("offload.activations=cpu", "lower parallel.micro_batch_size"),
        (
            "offload.activations=cpu parallel.recompute=auto parallel.recompute_budget_gb=0.03 offload.link_gb_s=1e5",
            r"a lower offload\.link_gb_s=100000",
        ),
        ("offload.optimizer=cpu offload.parameters=cpu parallel.zero=3", r"offload\.optimizer=nvme"),
        (f"offload.optimizer=nvme {NVME} offload.gradients=cpu model.layers=40", r"offload\.gradients=none"),
        (f"offload.optimizer=nvme {NVME} model.layers=4", r"offload\.prefetch_layers=2, or share the state"),
        (f"offload.optimizer=nvme {NVME} offload.prefetch_layers=1", "or share the state among more ranks"),
    ],
)
def test_advice_is_of_use(more: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        lay_out(config_of(*more.split(), "offload.host_budget_gb=1e-6"), 1)


@pytest.mark.req("C6")
@pytest.mark.parametrize("key", ["offload.host_budget_gb", "parallel.recompute_budget_gb"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "0"])
def test_a_budget_is_a_number(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*must be above 0 and at most 1e\+06"):
        config_of("offload.activations=cpu", "parallel.recompute=auto", f"{key}={value}")


@pytest.mark.req("C6")
def test_no_more_is_under_way_than_there_is() -> None:
    def kept(ahead: int) -> Bytes:
        more = [
            "offload.optimizer=cpu",
            "offload.parameters=cpu",
            "offload.activations=cpu",
            "parallel.zero=3",
        ]
        config = config_of(*more, f"offload.prefetch_layers={ahead}", "model.layers=3")
        return memory(config, lay_out(config, 2), 0, "cuda")[Role.under_way]

    assert kept(1).device < kept(3).device <= kept(10).device == kept(1000).device


@pytest.mark.req("C6")
def test_every_stage_of_a_pipeline_is_held_against_the_budget() -> None:
    """The last stage has the head: it may need more than the first."""
    overrides = [
        "parallel.pp=2",
        "parallel.split=[2,4]",
        "model.layers=6",
        "offload.optimizer=cpu",
        "model.dim=64",
        "model.heads=4",
    ]
    config = config_of(*overrides)
    dims = lay_out(config, 2)
    first, last = (total(memory(config, dims, rank, "cpu")).host / GB for rank in (0, 1))
    assert first < last
    assert heaviest(config, dims, "cpu")[0] == 1
    with pytest.raises(ConfigError, match="rank 1 needs"):
        lay_out(config_of(*overrides, f"offload.host_budget_gb={(first + last) / 2}"), 2)


@pytest.mark.req("C6")
def test_the_table_says_what_there_is_and_what_does_not_fit() -> None:
    config = config_of("parallel.zero=3", "offload.optimizer=nvme", NVME, "offload.host_budget_gb=2")
    kept = memory(config, lay_out(config, 2), 0, "cuda")
    table = lines(0, kept, config.offload, {"device": 40 * GB, "host": 10 * GB, "nvme": 1000})
    head, *rows = table
    assert re.fullmatch(r"[kMG]B of rank 0 +device +host +NVMe", head)
    words = [re.split(r"  +", row)[0] for row in rows]
    assert words[:2] == ["parameters", "gradients"]
    # Disks are held against what is free when leftovers are gone.
    assert words[-3:] == ["in all", "budget", "there is"]
    assert lines(0, kept, config.offload, {"host": 1000})[-1].startswith("host: more than there is")
    sums = dict(zip(words, rows, strict=True))["in all"].split()[2:]
    for column, text in enumerate(sums, 1):
        values = [
            row.split("  ") for row in rows if not row.startswith(("in all", "budget", "there", "NVMe"))
        ]
        cells = [[cell for cell in one if cell][column].strip() for one in values]
        added = sum(float(cell.replace(",", "")) for cell in cells if cell != "-")
        assert float(text.replace(",", "")) == pytest.approx(added, abs=0.05)


def proc(folder: Path, cgroup: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n")
    (folder / "self" / "cgroup").write_text(cgroup)
    return folder


@pytest.mark.req("C6")
def test_a_job_has_what_its_control_group_leaves_it(tmp_path: Path) -> None:
    """Files as the kernel has them, of either version: the limit may be that of a group further up."""
    groups = tmp_path / "groups"
    step = groups / "slurm" / "job_7" / "step_0"
    step.mkdir(parents=True)
    version_2 = proc(tmp_path / "two", "0::/slurm/job_7/step_0\n")
    assert host_memory(version_2, groups) == (800 * 1024, 1000 * 1024)
    (step / "memory.max").write_text("max\n")
    job = step.parent
    (job / "memory.max").write_text(f"{500 * 1024}\n")
    (job / "memory.current").write_text(f"{300 * 1024}\n")
    (job / "memory.stat").write_text(f"anon 7\ninactive_file {200 * 1024}\n")
    assert host_memory(version_2, groups) == (400 * 1024, 500 * 1024)

    version_1 = proc(tmp_path / "one", "4:memory:/slurm/job_7\n3:cpuset:/\n0::/\n")
    old = groups / "memory" / "slurm" / "job_7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{600 * 1024}\n")
    (old / "memory.usage_in_bytes").write_text(f"{600 * 1024}\n")
    (old / "memory.stat").write_text(f"total_inactive_file {50 * 1024}\n")
    assert host_memory(version_1, groups) == (50 * 1024, 600 * 1024)


@pytest.mark.req("C6")
def test_this_machine_has_memory() -> None:
    free, everything = host_memory()
    assert 0 < free <= everything


@pytest.mark.req("C6")
def test_what_does_not_fit_ends_before_it_begins() -> None:
    kept = {role: Bytes() for role in Role} | {
        Role.optimizer: Bytes(device=10 * GB, host=20 * GB),
        Role.activations: Bytes(device=100 * GB),
    }
    config = config_of("offload.optimizer=cpu")
    gpu = Room(device=40 * GB, host=30 * GB, host_total=40 * GB, nvme=None)
    check_fits(config, kept, gpu, rank=0, local_ranks=4)  # activations are reckoned only
    with pytest.raises(ConfigError, match=r"rank 3 keeps 10 GB .* on its device, which has 5 GB"):
        check_fits(config, kept, Room(5 * GB, 30 * GB, 40 * GB, None), rank=3, local_ranks=4)
    with pytest.raises(
        NodeError, match=r"has 15 GB free for each of its 4 ranks: something else .* uses 10 GB"
    ):
        check_fits(config, kept, Room(40 * GB, 15 * GB, 25 * GB, None), rank=3, local_ranks=4)
    with pytest.raises(ConfigError, match=r"needs 20 GB of memory of the host.*offload.optimizer=nvme"):
        check_fits(config, kept, Room(40 * GB, 15 * GB, 16 * GB, None), rank=3, local_ranks=4)
    # A CPU's own part comes from the same memory.
    with pytest.raises(ConfigError, match="needs 30 GB"):
        check_fits(config, kept, Room(None, 25 * GB, 25 * GB, None), rank=3, local_ranks=1)


@pytest.mark.req("A22")
@pytest.mark.parametrize(
    ("more", "share"),
    [
        ("parallel.zero=0", 4),  # copies are written once
        ("parallel.zero=3", 4),
        ("parallel.zero=2 parallel.dp_replicate=2", 4),
        ("parallel.zero=3 checkpoint.background=false", None),
        ("parallel.zero=3 offload.optimizer=cpu", None),  # read from where it is
        ("parallel.zero=1 precision=four_level", None),
    ],
)
def test_a_save_in_the_background_takes_a_copy_on_the_host(more: str, share: int | None) -> None:
    config = config_of(*more.split(), "model.dim=64", "model.heads=4", "model.ffn_dim=128")
    kept = memory(config, lay_out(config, 4), 0, "cuda")
    expected = 0 if share is None else 12 * parameter_count(config.model) // share
    assert kept[Role.checkpoint] == Bytes(host=expected)
