"""The names that other trainers use for the degrees, wherever a setting is taken."""

from pathlib import Path

import pytest

from configs.compose import choices, to_yaml
from configs.sweep import Composer, parse_sweep
from contract.errors import ConfigError
from train.config import TrainConfig, load_config, read_config
from train.layout.check import lay_out

EXAMPLE = [
    "data_parallel_size=8",
    "tensor_parallel_size=4",
    "pipeline_parallel_size=2",
    "micro_batch_size=16",
    "gradient_accumulation_steps=4",
]


@pytest.mark.req("B1", "C5")
def test_the_example_means_what_it_says(tmp_path: Path) -> None:
    config = load_config([*EXAMPLE, "context_parallel_size=2", "model.heads=8"])
    parallel = config.parallel
    assert (parallel.dp, parallel.tp, parallel.pp, parallel.cp) == (8, 4, 2, 2)
    assert (parallel.micro_batch_size, parallel.gradient_accumulation_steps) == (16, 4)
    dims = lay_out(config, 128, 8)
    assert dims.shape == (2, 8, 1, 2, 4)
    assert config.loop.global_batch_size == 8 * 16 * 4

    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config([])))
    assert read_config(path, EXAMPLE) == load_config(EXAMPLE)


@pytest.mark.req("B1")
@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "parallel.gradient_accumulation_steps"])
@pytest.mark.parametrize("recipe", [None, *choices("recipe")])
def test_accumulation_sets_the_global_batch_unless_that_is_given(key: str, recipe: str | None) -> None:
    base = [] if recipe is None else [f"recipe={recipe}", "data.prefix=data/tokens"]
    assert load_config([*base, f"{key}=4"]).loop.global_batch_size is None
    assert load_config([*base, f"{key}=4", "loop.global_batch_size=64"]).loop.global_batch_size == 64
    assert load_config([*base, f"{key}=null"]) == load_config(base)
    with pytest.raises(ConfigError, match=r"makes 32 samples a step, but loop\.global_batch_size=64"):
        lay_out(load_config([f"{key}=4", "loop.global_batch_size=64"]), 1)


@pytest.mark.req("B1")
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["tensor_parallel_size=4", "parallel.tp=2"],
            "tensor_parallel_size=4 and parallel.tp=2 set the same key, parallel.tp: give one",
        ),
        (
            ["parallel.dp=4", "data_parallel_size=2"],
            "parallel.dp=4 and data_parallel_size=2 set the same key, parallel.dp: give one",
        ),
        (
            ["tensor_paralel_size=4"],
            "tensor_paralel_size: there is no such key, did you mean tensor_parallel_size",
        ),
        (["gradient_acumulation_steps=4"], "did you mean gradient_accumulation_steps"),
        (["micro_batchsize=4"], "did you mean micro_batch_size"),
        (["tensor_parallel_size=0"], "parallel.tp=0: must be at least 1"),
        (["tensor_parallel_size=two"], "parallel.tp: Value 'two'"),
        (["+tensor_parallel_size=2"], "keys cannot be added"),
        (["tensor_parallel_size=1,2"], "one run takes one value"),
    ],
)
def test_what_is_wrong_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert sentence in str(caught.value)


@pytest.mark.req("B1")
def test_both_names_may_say_the_same() -> None:
    assert load_config(["tensor_parallel_size=4", "parallel.tp=4"]) == load_config(["parallel.tp=4"])


@pytest.mark.req("B1", "C12")
def test_synonyms_are_swept_like_their_keys() -> None:
    sweep = parse_sweep(["tensor_parallel_size=1,2", "gradient_accumulation_steps=2,4"], TrainConfig)
    assert sweep.keys == ["parallel.tp", "parallel.gradient_accumulation_steps"]
    composer = Composer("train", TrainConfig, sweep.base)
    made = [composer.compose(one) for one in sweep.combinations]
    assert [(one.parallel.tp, one.parallel.gradient_accumulation_steps) for one in made] == [
        (1, 2),
        (1, 4),
        (2, 2),
        (2, 4),
    ]
    assert [one.loop.global_batch_size for one in made] == [None] * 4
    with pytest.raises(ConfigError, match="set the same key"):
        parse_sweep(["tensor_parallel_size=1,2", "parallel.tp=4"], TrainConfig)


@pytest.mark.req("B1", "C12")
def test_in_a_sweep_a_batch_that_is_given_stays() -> None:
    lines = ["gradient_accumulation_steps=2 loop.global_batch_size=16", "optim.lr=1"]
    sweep = parse_sweep([], TrainConfig, lines)
    composer = Composer("train", TrainConfig, sweep.base)
    assert [composer.compose(one).loop.global_batch_size for one in sweep.combinations] == [16, 16]
    composer = Composer("train", TrainConfig, ["loop.global_batch_size=32"])
    assert composer.compose(["parallel.gradient_accumulation_steps=4"]).loop.global_batch_size == 32
    composer = Composer("train", TrainConfig, ["parallel.gradient_accumulation_steps=4"])
    assert composer.compose(["seed=1"]).loop.global_batch_size is None
    assert composer.compose(["loop.global_batch_size=32"]).loop.global_batch_size == 32
