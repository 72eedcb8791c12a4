"""DeepSpeed's configuration as settings of ours, against what DeepSpeed itself has made of configurations.

`tests/golden/deepspeed_config.json` is made by `tests/harness/deepspeed_config_facts.py`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import compose, parse_setting
from contract.errors import ConfigError
from tools.deepspeed.batch import settle
from tools.deepspeed.file import File, read
from tools.deepspeed.optim import OF_ONE_CYCLE
from tools.deepspeed.rule import Facts
from tools.deepspeed.translate import BATCH, KEYS, RULES, Translation, translate
from train.config import Decay, TrainConfig, Warmup, load_config
from train.layout.batch import check_batch, micro_batches, samples_per_step
from train.optim.schedule import learning_rate
from train.precision.config import Compute, PrecisionConfig
from train.precision.scale import LossScale

FACTS = json.loads((Path(__file__).parents[1] / "golden/deepspeed_config.json").read_text())
SIZES = tuple(BATCH)
ONE = {"train_micro_batch_size_per_gpu": 1}

pytestmark = [pytest.mark.req("D4"), pytest.mark.slow]


def translated(tree: dict[str, Any], *command_line: str, ranks: int | None = 1, **facts: Any) -> Translation:
    """Translate beside settings of a command line, without composing a configuration."""
    known = {
        "micro_batch_size": 8,
        "steps": 1000,
        "lr": 1e-3,
        "warmup_steps": 100,
        "sets_accumulation": False,
    }
    found = Facts(ranks=ranks, **{**known, **facts})
    given = dict(text.split("=", 1) for text in command_line)
    return translate(File.of("ds.json", tree), given, lambda settings: found)


def settings(tree: dict[str, Any], *command_line: str, **facts: Any) -> dict[str, str]:
    """Key -> value of what a configuration of one sample at a time becomes."""
    whole = tree if any(key in tree for key in SIZES) else {**ONE, **tree}
    return dict(text.split("=", 1) for text in translated(whole, *command_line, **facts).settings)


def refusal(tree: dict[str, Any], *command_line: str, **facts: Any) -> str:
    """The sentence with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        settings(tree, *command_line, **facts)
    sentence = str(caught.value)
    assert sentence.startswith("ds.json: ")
    assert "\n" not in sentence
    return sentence


def tree_of(path: str, value: Any) -> dict[str, Any]:
    """A configuration with one value at a dotted path."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for key, value in other.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


# --- Keys


@pytest.mark.parametrize("key", FACTS["keys"])
def test_every_key_that_deepspeed_reads_is_known(key: str) -> None:
    if key in ("bfloat16", "tensor_parallel.tensor_parallel"):  # other names, of bf16 and of tp
        return
    within = [known for known in KEYS if known.startswith(f"{key}.")]
    above = [known for known in RULES if key.startswith(f"{known}.")]
    assert key in KEYS or within or above


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_is_refused_with_the_nearest_one(key: str) -> None:
    section, _, name = key.rpartition(".")
    wrong = f"{name}x"
    path = f"{section}.{wrong}" if section else wrong
    assert path not in KEYS
    sentence = refusal(merged(ONE, tree_of(path, 1)))
    assert sentence.startswith(f"ds.json: {path}: DeepSpeed has no such key, did you mean ")
    assert key in sentence


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in KEYS if "." in key}))
def test_a_section_must_be_one(section: str) -> None:
    assert f"{section}=3: this is a section" in refusal({section: 3})


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from(
        [0.0, 0.5, 1.0, 5e8, float("inf"), "auto", "cpu", "nvme", "bf16", "log", "AdamW", "WarmupLR", ""]
    ),
    st.lists(st.floats(0, 1), max_size=3),
    st.just({"enabled": False}),
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8), st.sampled_from([None, 1, 2, 3]))
def test_each_key_has_its_row_or_the_whole_is_refused_with_a_sentence(
    chosen: dict[str, Any], ranks: int | None
) -> None:
    tree: dict[str, Any] = dict(ONE)
    for key, value in chosen.items():
        tree = merged(tree, tree_of(key, value))
    try:
        found = translated(tree, ranks=ranks)
    except ConfigError as error:
        assert str(error).startswith("ds.json: ")
        assert "\n" not in str(error)
        return
    told = {row.key: row for row in found.rows}
    assert chosen.keys() <= told.keys()
    assert all(row.here for row in found.rows)
    for text in found.settings:
        parse_setting(text)
    keys = [text.partition("=")[0] for text in found.settings]
    assert len(set(keys)) == len(keys)


BESIDE = {
    "scheduler.params.total_num_steps": {"scheduler": {"type": "WarmupDecayLR"}},
    "scheduler.params.warmup_min_ratio": {
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    },
    "scheduler.params.cos_min_ratio": {
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}
    },
}
"""What a key needs beside it."""


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_be_had_with_some_value(key: str) -> None:
    """At least as the thing that is not wanted."""
    usual = {"scheduler.params": {"type": "WarmupLR"}, "optimizer.params": {"type": "AdamW"}}
    section = key.rpartition(".")[0]
    beside = BESIDE.get(key, {section.partition(".")[0]: usual[section]} if section in usual else {})
    for value in (False, True, 1, -1, "auto", "none", "mean", "fp32", "AdamW", "WarmupLR", [0.9, 0.99]):
        try:
            found = translated(merged({**ONE, **beside}, tree_of(key, value)), steps=9, warmup_steps=5)
        except ConfigError:
            continue
        (row,) = [row for row in found.rows if row.key == key]
        assert row.here
        assert row.value == json.dumps(value)
        return
    assert (
        key in {f"scheduler.params.{name}" for name in OF_ONE_CYCLE}
        or key == "optimizer.params.max_grad_norm"
    )


# --- Batch


@pytest.mark.parametrize("ranks", sorted({fact[3] for fact in FACTS["batch"]}))
def test_the_sizes_of_a_batch_are_those_of_deepspeed(ranks: int) -> None:
    """Whatever is given; what is left to follow here is what a layout here makes of it."""
    compared = [fact for fact in FACTS["batch"] if fact[3] == ranks]
    assert len(compared) > 100
    for *sizes, _, expected in compared:
        tree = {key: value for key, value in zip(SIZES, sizes, strict=True) if value is not None}
        if expected is not None:
            assert resolved(translated(tree, ranks=ranks), ranks) == expected, tree
            continue
        with pytest.raises(ConfigError, match=r"^ds.json: "):
            translated(tree, ranks=ranks)


def resolved(found: Translation, ranks: int) -> list[int]:
    """Samples a step, at once, and how often: as the layout of a configuration has them."""
    config = TrainConfig()
    values = {text.partition("=")[0]: text.partition("=")[2] for text in found.settings}
    config.loop.global_batch_size = None
    for key, value in values.items():
        section, _, name = key.partition(".")
        if key in BATCH.values():
            setattr(getattr(config, section), name, int(value))
    dims = SimpleNamespace(dp=ranks)
    train = samples_per_step(config, dims)  # type: ignore[arg-type]
    check_batch(train, config.parallel.micro_batch_size, ranks)
    return [train, config.parallel.micro_batch_size, micro_batches(config, dims)]  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_any_two_sizes_give_the_third(micro: int, steps: int, ranks: int) -> None:
    whole = micro * steps * ranks
    for asked in ((whole, micro, None), (whole, None, steps), (None, micro, steps), (whole, micro, steps)):
        found = settle(*asked, ranks)
        assert (found.train, found.micro, found.steps) == (whole, micro, steps)
    if ranks > 1:
        with pytest.raises(ValueError, match="train_batch_size"):
            settle(whole + 1, micro, steps, ranks)


@pytest.mark.parametrize(
    ("tree", "command_line", "expected"),
    [
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, [], [16, 8, 1]),
        (dict.fromkeys(SIZES, "auto"), [], [16, 8, 1]),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": "auto"}, [], [48, 8, 3]),
        ({**dict.fromkeys(SIZES, "auto"), "gradient_accumulation_steps": 4}, [], [64, 8, 4]),
        (
            {
                "train_batch_size": 48,
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 4,
            },
            [],
            [48, 6, 4],
        ),
        (dict.fromkeys(SIZES, "auto"), ["parallel.micro_batch_size=2"], [4, 2, 1]),
        (dict.fromkeys(SIZES, "auto"), ["loop.global_batch_size=64"], [64, 8, 4]),
        ({"train_batch_size": 48}, ["parallel.micro_batch_size=4"], [48, 4, 6]),
        ({}, ["parallel.micro_batch_size=4"], [8, 4, 1]),
    ],
)
def test_auto_sizes_are_those_of_the_trainer_and_the_rest_follows(
    tree: dict[str, Any], command_line: list[str], expected: list[int]
) -> None:
    """As Hugging Face's trainer fills them in: 8 samples at once, as here, unless another one is asked for."""
    found = translated(tree, *command_line, ranks=2)
    given = Translation((*found.settings, *command_line), found.rows)
    assert resolved(given, 2) == expected


def test_sizes_that_do_not_go_together_are_refused() -> None:
    both = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert (
        "train_batch_size=64 is not train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=5 x 3 data-"
        in (refusal(both, ranks=3))
    )
    assert "train_batch_size=2 is too small for 4 data-parallel ranks" in refusal(
        {"train_batch_size": 2}, ranks=4
    )
    assert "neither train_batch_size nor" in refusal({"gradient_accumulation_steps": 4})
    assert "whole number of at least 1" in refusal({"train_batch_size": 0})
    assert "whole number of at least 1" in refusal({"train_batch_size": "64"})
    # A size of the command line stands in for that of the file, and must go with the others.
    assert "is not" in refusal(
        {**both, "gradient_accumulation_steps": 4}, "parallel.micro_batch_size=8", ranks=4
    )


def test_a_recipe_does_not_bring_its_own_accumulation() -> None:
    found = settings(
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, ranks=4, sets_accumulation=True
    )
    assert found["parallel.gradient_accumulation_steps"] == "null"


# --- Numbers


def optim_of(found: Sequence[str]) -> TrainConfig:
    """A configuration with the settings of `optim` and `loop`, as they are."""
    config = TrainConfig()
    kinds = {"decay": Decay, "warmup": Warmup}
    for text in found:
        key, _, value = text.partition("=")
        section, _, name = key.partition(".")
        if section == "optim":
            plain = kinds[name](value) if name in kinds else json.loads(value)
            setattr(config.optim, name, plain)
        elif key == "loop.steps":
            config.loop.steps = int(value)
    return config


@pytest.mark.parametrize("fact", FACTS["rates"], ids=lambda fact: f"{fact['type']}-{fact['params']}")
def test_learning_rates_are_those_of_deepspeed_step_by_step(fact: dict[str, Any]) -> None:
    tree = {
        **ONE,
        "optimizer": {"type": "AdamW", "params": {"lr": FACTS["lr"]}},
        "scheduler": {"type": fact["type"], "params": fact["params"]},
    }
    config = optim_of(translated(tree, warmup_steps=2, steps=41).settings)
    steps = len(fact["rates"])
    assert config.loop.steps == fact["params"].get("total_num_steps", TrainConfig().loop.steps)
    ours = [learning_rate(config.optim, step, steps) for step in range(steps)]
    assert ours == pytest.approx(fact["rates"], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("fact", FACTS["scales"], ids=lambda fact: f"hysteresis-{fact['hysteresis']}")
def test_the_loss_scale_falls_as_deepspeeds(fact: dict[str, Any]) -> None:
    config = PrecisionConfig(
        compute=Compute.float16, loss_scale_hysteresis=fact["hysteresis"], loss_scale_growth_steps=10**6
    )
    scale = LossScale.of(config)
    for overflow, expected in zip(fact["overflows"], fact["scales"], strict=True):
        assert scale.passes(torch.tensor(float("inf") if overflow else 1.0)) is not bool(overflow)
        assert scale.value == expected
        again = LossScale.of(config)
        again.load_state_dict(scale.state_dict())
        assert again == scale


def test_absent_keys_have_deepspeeds_defaults() -> None:
    found = settings({"optimizer": {"type": "Adam"}, "fp16": {"enabled": True}})
    assert float(found["optim.lr"]) == 1e-3
    assert (found["optim.beta1"], found["optim.beta2"], float(found["optim.eps"])) == ("0.9", "0.999", 1e-8)
    assert float(found["optim.weight_decay"]) == 0
    assert (found["optim.decay"], found["optim.warmup_steps"]) == ("constant", "0")
    assert float(found["loop.clip_norm"]) == FACTS["clipping"]
    assert (found["precision"], float(found["precision.loss_scale"])) == ("fp16", 2**16)
    assert found["precision.loss_scale_growth_steps"] == "1000"
    assert (found["precision.loss_scale_hysteresis"], float(found["precision.loss_scale_min"])) == ("2", 1)
    assert found["parallel.zero"] == "0"
    assert settings({})["precision"] == "fp32"
    assert not [key for key in settings({}) if key.startswith("optim.")]
    torch_adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert float(settings(torch_adam)["optim.weight_decay"]) == 0.01


OFFLOADED = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
NVME = {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/disks/it's 1"},
    "offload_param": {"device": "nvme", "nvme_path": "/disks/2"},
}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"zero_optimization": {"stage": 2}}, {"parallel.zero": "2"}),
        ({"zero_optimization": True}, {"parallel.zero": "1"}),
        (
            {"zero_optimization": OFFLOADED},
            {"offload.optimizer": "cpu", "offload.gradients": "cpu", "offload.parameters": "cpu"},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"offload.optimizer": "cpu"}),
        (
            {"zero_optimization": NVME},
            {"offload.optimizer": "nvme", "offload.nvme_path": r"['/disks/it\'s 1','/disks/2']"},
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, {"parallel.dp_shard": "4"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"precision": "bf16"}),
        ({"bf16": {"enabled": True}, "communication_data_type": "bf16"}, {"precision.reduce": "bfloat16"}),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            {"precision.accumulate": "bfloat16"},
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 32}}, {"precision.loss_scale": str(2.0**24)}),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}},
            {"precision.loss_scale": "128.0", "precision.loss_scale_min": "128.0"},
        ),
        ({"gradient_clipping": 0}, {"loop.clip_norm": "0.0"}),
        ({"steps_per_print": 50}, {"loop.log_every_steps": "50"}),
        ({"tensorboard": {"enabled": False}}, {"monitor.tensorboard": "false"}),
        ({"activation_checkpointing": {"partition_activations": True}}, {"parallel.recompute": "full"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"offload.activations": "cpu"}),
        ({"sequence_parallel_size": 2}, {"parallel.cp": "2"}),
        ({"tensor_parallel": {"autotp_size": 4}}, {"parallel.tp": "4"}),
        ({"pipeline": {"stages": 2}}, {"parallel.pp": "2"}),
        ({"compile": {"deepcompile": True}}, {"parallel.compile": "true"}),
    ],
)
def test_what_maps_to_what(tree: dict[str, Any], expected: dict[str, str]) -> None:
    found = settings(tree)
    assert expected.items() <= found.items()
    compose("train", TrainConfig, [f"{key}={value}" for key, value in found.items()])


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"optimizer": {"type": "Lamb"}},
            'optimizer.type="Lamb": there is no such optimizer here: write AdamW',
        ),
        ({"optimizer": {"type": "CPUAdam"}}, "own optimizers are Adam, AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}}, "without quotation marks"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "a list of two numbers"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "added to gradients",
        ),
        ({"scheduler": {"type": "OneCycle"}}, "there is no such schedule here"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1}}, "scheduler": {"type": "Cosine"}},
            'scheduler.type="Cosine": DeepSpeed has no such scheduler',
        ),
        ({"optimizer": {"params": {"lr": 1.0}}}, "there is no optimizer.type, name one or drop the section"),
        ({"scheduler": {"type": 3}}, "scheduler.type=3: DeepSpeed has no such scheduler"),
        ({"fp16": {"auto_cast": True, "enabled": 3}}, "fp16.enabled=3: write true or false"),
        ({"scheduler": {"type": "WarmupLr"}}, "DeepSpeed has no such scheduler, did you mean WarmupLR"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "wants scheduler.params.total_num_steps too"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"cos_min_ratio": 0}}},
            "WarmupLR has no such parameter",
        ),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "at least 1"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "choose log or linear"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be enabled together"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "in fp32 here"),
        ({"fp16": {"enabled": "yes"}}, 'fp16.enabled="yes": write true or false'),
        ({"communication_data_type": "fp16"}, "choose fp32 or bf16"),
        ({"zero_optimization": {"stage": 4}}, "choose 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "with stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "with stage 3 alone"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "give offload_optimizer.device",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "needs offload_optimizer.nvme_",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "parallel.dp_shard=8"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "not in 8 bits"),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "the old name of offload_optimizer",
        ),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "write bf16 or fp16"),
        ({"elasticity": {"enabled": True}}, "set enabled to false"),
        ({"elasticity": {"enabledd": False, "max": 3}}, "set enabled to false"),
        ({"autotuning": {"enabled": True}}, "trierarch layout"),
        ({"wandb": {"enabled": True}}, "nothing is sent to Weights & Biases"),
        ({"gradient_allreduce_op": "sum"}, "write mean"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "not compressed: drop the section",
        ),
    ],
)
def test_what_there_is_not_is_refused(tree: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(tree)


def test_features_that_are_off_are_no_hindrance() -> None:
    off = {
        "amp": {"enabled": False},
        "elasticity": {"enabled": False, "max_train_batch_size": 9},
        "sparse_gradients": False,
    }
    shared = {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}}
    assert settings({**off, **shared}) == settings({})


def test_the_scheduler_has_the_last_word_on_the_rate() -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 3e-4}}}
    scheduler = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 400}}}
    assert float(settings({**adam, **scheduler}, warmup_steps=9)["optim.lr"]) == 1e-3
    assert float(settings({**adam, "scheduler": {"type": "WarmupLR"}})["optim.lr"]) == 3e-4
    told = {row.key: row.here for row in translated({**ONE, **adam, **scheduler}, warmup_steps=9).rows}
    assert told["optimizer.params.lr"] == "the scheduler sets its own rates, up to warmup_max_lr"
    assert "its warm-up of 1000 steps is longer than the 400 steps" in refusal(
        {**adam, **scheduler}, steps=400, warmup_steps=1000
    )


def test_auto_leaves_a_setting_as_it_is() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    found = settings(
        {
            "optimizer": {"type": "AdamW", "params": params},
            "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
            "gradient_clipping": "auto",
        }
    )
    untouched = (
        "optim.lr",
        "optim.beta1",
        "optim.eps",
        "optim.weight_decay",
        "optim.warmup_steps",
        "precision",
    )
    assert not {*untouched, "loop.steps", "loop.clip_norm"} & found.keys()
    assert (found["optim.decay"], float(found["optim.min_lr_ratio"])) == ("linear", 0)


# --- The command line


def test_the_command_line_wins_and_the_table_says_so() -> None:
    tree = {
        **ONE,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "fp16": {"enabled": True},
        "zero_optimization": OFFLOADED,
        "scheduler": {"type": "WarmupLR"},
    }
    found = translated(tree, "optim.lr=2e-4", "precision=bf16", "offload.optimizer=none", "optim.decay=wsd")
    keys = {text.partition("=")[0] for text in found.settings}
    assert not {"optim.lr", "precision", "offload.optimizer", "offload.gradients", "optim.decay"} & keys
    assert not {key for key in keys if key.startswith("precision.loss_scale")}, "bf16 scales no loss"
    assert "optim.deepspeed_steps" not in keys, "wsd is none of DeepSpeed's"
    told = {row.key: row.here for row in found.rows}
    assert told["optimizer.params.lr"] == "optim.lr=2e-4 of the command line wins over optim.lr=0.0001"
    assert told["fp16.enabled"].startswith("precision=bf16 of the command line wins over precision=fp16")


def test_a_precision_of_the_command_line_decides_for_auto() -> None:
    tree = {"fp16": {"enabled": "auto", "loss_scale_window": 500}, "bf16": {"enabled": "auto"}}
    assert settings(tree, "precision=fp16")["precision.loss_scale_growth_steps"] == "500"
    assert "precision.loss_scale_growth_steps" not in settings(tree, "precision=bf16")


# --- The file


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"train_batch_size": 8,}', "ds.json, line 1, column 24: this is no JSON"),
        ('{\n"a": 1 // ours\n}', "ds.json, line 2, column 8: this is no JSON"),
        ("[1]", "this is no JSON object"),
        ("", "this is no JSON"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "enabled is given twice"),
        ('{"bf16": {}, "bfloat16": {}}', "the same section"),
        ("[" * 100_000, "objects lie in each other too deeply"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="the file cannot be read"):
            read(path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="it is no text"):
        read(tmp_path / "bytes")
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"train_batch_size": 8}')
    assert read(tmp_path / "bom.json").tree == {"train_batch_size": 8}


def test_a_login_node_imports_neither_torch_nor_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 16, "bf16": {"enabled": true}}')
    statement = (
        "import sys; sys.argv = ['trierarch', 'train', '--cfg', 'job', '--ranks', '2', '--deepspeed', 'ds.json']\n"
        "from tools.cli import app\napp(standalone_mode=False)\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", statement], check=True, cwd=tmp_path, timeout=60, stdout=subprocess.DEVNULL
    )


# --- Our own settings that this needs


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("optim.warmup_min_ratio=1.5", "optim.warmup_min_ratio=1.5: must be between 0 and 1"),
        ("precision.loss_scale_hysteresis=2", "does nothing, for no product is computed in float16"),
    ],
)
def test_settings_are_checked(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config([setting])


def test_wsd_is_none_of_deepspeeds() -> None:
    with pytest.raises(ConfigError, match=r"DeepSpeed has no optim.decay=wsd"):
        load_config(["optim.decay=wsd", "optim.deepspeed_steps=true"])
    with pytest.raises(ConfigError, match=r"loss_scale_hysteresis=0: must be at least 1"):
        load_config(["precision=fp16", "precision.loss_scale_hysteresis=0"])
