"""Makes `tests/golden/deepspeed_config.json` by DeepSpeed itself, which is not among the packages that tests need.

    pip install deepspeed && python deepspeed_config_facts.py > tests/golden/deepspeed_config.json

keys: what it reads of a configuration. batch: what it makes of sizes. rates: what its schedulers give, step by step.
scales: what its loss scale does.
"""

import itertools
import json
import random
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

MODELS = {
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}
LR = 0.01
"""Of the optimizer."""
SECTIONS = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "checkpoint",
    "data_types",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "torch_autocast",
)


class Recorder(dict[str, Any]):
    """Notes which keys are asked for."""

    asked: set[str]

    def __init__(self, *pairs: Any) -> None:
        super().__init__(*pairs)
        self.asked = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __copy__(self) -> "Recorder":
        return self


def keys() -> list[str]:
    """Every dotted key that DeepSpeed reads, of features that are off too."""
    sections = {name: Recorder() for name in SECTIONS}
    sections["optimizer"]["type"], sections["scheduler"]["type"] = "Adam", "WarmupLR"
    tree = Recorder({"train_batch_size": 1, **sections})
    config = DeepSpeedConfig(tree)
    found = {*tree.asked, *(f"pipeline.{key}" for key in config.pipeline)}
    for name, section in sections.items():
        found |= {f"{name}.{key}" for key in section.asked}
    for name, model in MODELS.items():
        for key, field in model.model_fields.items():
            found |= {f"{name}.{key}", f"{name}.{field.alias or key}"}
    return sorted(found)


def batch(sizes: dict[str, int], ranks: int) -> list[int] | None:
    """The three sizes as DeepSpeed settles them, None where it refuses."""
    with (
        mock.patch("deepspeed.comm.get_rank", return_value=0),
        mock.patch("deepspeed.comm.get_world_size", return_value=ranks),
    ):
        try:
            config = DeepSpeedConfig(dict(sizes))
        except AssertionError:
            return None
    assert config.world_size == ranks
    return [
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ]


def batches() -> list[Any]:
    """Sizes, ranks and what comes of them."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    every = itertools.product((None, 1, 6, 8, 24, 48), (None, 1, 2, 3, 4), (None, 1, 2, 3), (1, 2, 3, 4, 6))
    return [
        [*sizes, ranks, batch({k: v for k, v in zip(names, sizes, strict=True) if v is not None}, ranks)]
        for *sizes, ranks in every
    ]


def rates(name: str, params: dict[str, Any], lr: float, steps: int) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = getattr(lr_schedules, name)(optimizer, **params)
    found = []
    for _ in range(steps):
        found.append(float(f"{optimizer.param_groups[0]['lr']:.12g}"))
        optimizer.step()
        scheduler.step()
    return found


def schedules() -> list[dict[str, Any]]:
    """Schedulers as a configuration has them, and their rates."""
    found = []
    for kind, warmup, total in itertools.product(("log", "linear", None), (1, 2, 10, 40), (41,)):
        shape = {} if kind is None else {"warmup_type": kind}
        many = {**shape, "warmup_num_steps": warmup}
        for name, params in (
            ("WarmupLR", {**many, "warmup_max_lr": 0.02}),
            ("WarmupLR", {**many, "warmup_min_lr": 0.001}),
            ("WarmupDecayLR", {**many, "total_num_steps": total}),
            ("WarmupDecayLR", {**many, "total_num_steps": total, "warmup_min_lr": 1e-4}),
            (
                "WarmupDecayLR",
                {**many, "total_num_steps": total, "warmup_min_lr": 2e-4, "warmup_max_lr": 0.004},
            ),
            ("WarmupCosineLR", {**many, "total_num_steps": total}),
            (
                "WarmupCosineLR",
                {**many, "total_num_steps": total, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
            ),
        ):
            found.append({"type": name, "params": params, "rates": rates(name, params, LR, total)})
    return found


def scales() -> list[dict[str, Any]]:
    """Loss scales after each of some steps, with those that overflow."""
    found = []
    draw = random.Random(0)
    for hysteresis in (1, 2, 3):
        overflows = [draw.random() < 0.3 for _ in range(60)]
        scaler = DynamicLossScaler(2.0**16, 10**6, 1.0, hysteresis, False, raise_error_at_min_scale=False)
        values = []
        with mock.patch("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", return_value=1):
            for overflow in overflows:
                scaler.update_scale(overflow)
                values.append(scaler.cur_scale)
        found.append({"hysteresis": hysteresis, "overflows": list(map(int, overflows)), "scales": values})
    return found


if __name__ == "__main__":
    facts = {
        "deepspeed": deepspeed.__version__,
        "clipping": DeepSpeedConfig({"train_batch_size": 1}).gradient_clipping,
        "keys": keys(),
        "batch": batches(),
        "lr": LR,
        "rates": schedules(),
        "scales": scales(),
    }
    print(json.dumps(facts, separators=(",", ":")))
