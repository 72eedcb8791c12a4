"""What is offloaded in a layout that has no use for it is refused in one sentence; what costs what."""

import itertools

import pytest

from contract.errors import ConfigError
from train.config import TrainConfig, load_config
from train.layout.activations import layer_cost
from train.layout.check import lay_out
from train.layout.dims import ParallelDims
from train.layout.recompute import choose, plan

DIMS = ParallelDims(dp_shard=2)
HOST = "offload.activations=cpu"


def config_of(*more: str) -> TrainConfig:
    return load_config(["model.vocab_size=256", "parallel.micro_batch_size=2", *more])


@pytest.mark.req("C6", "B9")
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            "offload.optimizer=cpu offload.parameters=cpu parallel.zero=2",
            r"offload\.parameters=cpu .* parallel\.zero=2 does not: set parallel\.zero=3",
        ),
        (
            f"{HOST} parallel.compile=true",
            r"offload\.activations=cpu does not see .* parallel\.compile=false",
        ),
        (f"{HOST} offload.link_gb_s=50", r"offload\.link_gb_s=50 .* does nothing"),
        ("offload.prefetch_layers=3", r"offload\.prefetch_layers=3 does nothing"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(overrides: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        lay_out(config_of(*overrides.split()), 2)


@pytest.mark.req("C6")
@pytest.mark.parametrize(
    "overrides",
    [
        "offload.optimizer=cpu offload.parameters=cpu parallel.zero=3 offload.prefetch_layers=3",
        f"{HOST} offload.prefetch_layers=1 parallel.zero=2",
        f"{HOST} parallel.recompute=auto parallel.recompute_budget_gb=10 offload.link_gb_s=50",
    ],
)
def test_what_can_be_offloaded_is_not(overrides: str) -> None:
    assert lay_out(config_of(*overrides.split()), 2).dp == 2


@pytest.mark.req("C6")
def test_a_link_must_have_a_speed() -> None:
    with pytest.raises(ConfigError, match=r"offload\.link_gb_s=0"):
        config_of(HOST, "offload.link_gb_s=0")


@pytest.mark.req("C6")
@pytest.mark.parametrize(
    "key", ["nvme_path=[/local]", "nvme_settings=/local/nvme.json", "nvme_checksums=true"]
)
def test_what_is_for_disks_needs_something_on_them(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"offload\.{key.split('=')[0]} is given, but nothing goes to disks"
    ):
        config_of("offload.optimizer=cpu", f"offload.{key}")


@pytest.mark.req("A10")
def test_what_is_on_the_host_is_all_that_leaves_the_device() -> None:
    for mode in ("none", "selective", "full"):
        here = plan(config_of(f"parallel.recompute={mode}"), DIMS)
        there = plan(config_of(f"parallel.recompute={mode}", HOST), DIMS)
        assert there.host_bytes > 0 == here.host_bytes
        assert there.kept_bytes + there.host_bytes == here.kept_bytes
        assert there.recomputed_flops == here.recomputed_flops
        assert "on the host" in str(there) and "on the host" not in str(here)


@pytest.mark.req("A10")
def test_a_choice_weighs_bytes_on_a_link_against_work() -> None:
    """Within any budget the cheapest; a layer takes nothing of the device in the leanest."""

    def prices(link_gb_s: float) -> list[tuple[int, int]]:
        config = config_of(
            HOST,
            "parallel.recompute=auto",
            "parallel.recompute_budget_gb=9",
            f"offload.link_gb_s={link_gb_s}",
        )
        options = layer_cost(config, DIMS).frontier()
        assert options[0].kept_bytes == 0 and options[-1].price_flops == 0
        for lean, rich in itertools.pairwise(options):
            assert lean.kept_bytes < rich.kept_bytes and lean.price_flops > rich.price_flops
        chosen = choose(options, 4, 0)
        return [(keep.host_bytes, keep.recomputed_flops) for keep in chosen]

    everything = layer_cost(config_of(HOST), DIMS).everything_bytes
    assert prices(1e5) == [(everything, 0)] * 4
    slow_bytes, again = prices(1.0)[0]
    assert 0 < slow_bytes < everything and again > 0
