"""`--deepspeed FILE`: a run as with the same settings written by hand, for configurations as users have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.command import Trierarch
from harness.toy import MODEL, QUIET

from contract.exit_codes import ExitCode
from contract.run_folder import RunFolder, read_json_lines

pytestmark = pytest.mark.req("D4")

TOY = [*MODEL, *QUIET, "data.sequence_length=32", "loop.eval_batches=0", "loop.log_every_steps=1"]
STEPS = 6

ZERO2: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.01, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.05},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": STEPS,
            "warmup_num_steps": 3,
            "warmup_max_lr": 0.02,
            "warmup_type": "linear",
        },
    },
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
    },
}
BY_HAND = [
    "parallel.micro_batch_size=4",
    "parallel.gradient_accumulation_steps=2",
    "optim.lr=0.02",
    "optim.beta1=0.8",
    "optim.beta2=0.99",
    "optim.eps=1e-7",
    "optim.weight_decay=0.05",
    "optim.warmup_steps=3",
    "optim.decay=linear",
    "optim.min_lr_ratio=0",
    "optim.deepspeed_steps=true",
    "loop.clip_norm=0.5",
    "precision=bf16",
    "parallel.zero=2",
    "offload.optimizer=cpu",
    "offload.gradients=cpu",
]

ZERO3_AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FP16: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "wandb": {"enabled": False},
}


def write(folder: Path, tree: dict[str, Any]) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(tree))
    return str(path)


def numbers(folder: Path, name: str) -> list[dict[str, float]]:
    """What a run has logged of its steps."""
    lines = read_json_lines(RunFolder(folder / "runs" / name).metrics)
    return [{key: line[key] for key in ("loss", "grad_norm", "lr")} for line in lines if "loss" in line]


@pytest.mark.chaos  # for its length
def test_two_ranks_train_as_with_the_same_settings_by_hand(
    trierarch: Trierarch, tmp_path: Path, toy_tokens: Path
) -> None:
    data, steps = f"data.prefix={toy_tokens}", f"loop.steps={STEPS}"
    file = write(tmp_path, ZERO2)
    first = trierarch("train", "--ranks", "2", "--deepspeed", file, *TOY, data, "run.name=theirs")
    assert first.returncode == ExitCode.FINISHED, first.stderr
    second = trierarch("train", "--ranks", "2", *TOY, *BY_HAND, data, steps, "run.name=by-hand")
    assert second.returncode == ExitCode.FINISHED, second.stderr
    theirs, by_hand = numbers(tmp_path, "theirs"), numbers(tmp_path, "by-hand")
    assert theirs == by_hand
    assert len(theirs) == STEPS
    assert theirs[-1]["loss"] < theirs[0]["loss"]
    assert [line["lr"] for line in theirs] == pytest.approx(
        [0.0, 0.0, 0.02 / 3, 0.04 / 3, 0.02, 0.02 * 2 / 3]
    )

    # The table comes before the run, and says what became of each key.
    table = " ".join(first.stderr.split())
    for row in (
        "train_batch_size 16 loop.global_batch_size=16",
        "4, by the others and 2 data-parallel ranks",
        "optim.lr=0.02",
        "a layer is gathered, and its gradients are reduced, as one",
    ):
        assert row in table
    # The settings are those of the run folder, too.
    tree = yaml.safe_load((tmp_path / "runs/theirs/config.yaml").read_text())
    assert tree["offload"]["optimizer"] == tree["offload"]["gradients"] == "cpu"


@pytest.mark.slow
def test_two_ranks_train_as_deepspeed_itself_has(
    trierarch: Trierarch, tmp_path: Path, toy_tokens: Path
) -> None:
    """By `tests/harness/deepspeed_training.py`: losses, rates and norms before clipping, of the same samples."""
    facts = json.loads((Path(__file__).parents[1] / "golden/deepspeed_training.json").read_text())
    file = write(tmp_path, facts["config"])
    data = [f"data.prefix={toy_tokens}", "run.name=ours"]
    done = trierarch("train", "--ranks", "2", "--deepspeed", file, *TOY, *data)
    assert done.returncode == ExitCode.FINISHED, done.stderr
    ours = numbers(tmp_path, "ours")
    assert len(ours) == len(facts["steps"])
    for here, there in zip(ours, facts["steps"], strict=True):
        assert here == pytest.approx(there, rel=2e-5, abs=1e-12)


@pytest.mark.chaos  # for its length
@pytest.mark.parametrize("tree", [ZERO3_AUTO, FP16], ids=["zero3-auto", "fp16"])
def test_configurations_as_users_have_them_run(
    trierarch: Trierarch, tmp_path: Path, toy_tokens: Path, tree: dict[str, Any]
) -> None:
    file = write(tmp_path, tree)
    few = ["parallel.micro_batch_size=2", "optim.warmup_steps=2", "loop.steps=4", "run.name=theirs"]
    done = trierarch("train", "--ranks", "2", "--deepspeed", file, *TOY, *few, f"data.prefix={toy_tokens}")
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert len(numbers(tmp_path, "theirs")) == 4


def test_the_whole_configuration_is_printed_and_the_command_line_wins(
    trierarch: Trierarch, tmp_path: Path
) -> None:
    file = write(tmp_path, ZERO2)
    done = trierarch("train", "--ranks", "4", "--cfg", "job", "--deepspeed", file, "optim.lr=3e-4")
    assert done.returncode == 0, done.stderr
    tree = yaml.safe_load(done.stdout)
    assert tree["optim"]["lr"] == 3e-4
    assert (tree["loop"]["global_batch_size"], tree["parallel"]["micro_batch_size"]) == (16, 2)
    assert "optim.lr=3e-4 of the command line wins over optim.lr=0.02" in " ".join(done.stderr.split())


def test_a_job_gets_them_too(trierarch: Trierarch, tmp_path: Path) -> None:
    """With as many ranks as the job has."""
    file = write(tmp_path, {**ZERO2, "train_batch_size": 64})
    where = ["cluster=local", "job.ranks_per_node=8", "model=llama_25m"]
    done = trierarch("submit", "--dry-run", "--deepspeed", file, *where)
    assert done.returncode == 0, done.stderr
    assert "#!/bin/bash" in done.stdout
    assert "8 data-parallel ranks" in " ".join(done.stderr.split())
    layout = trierarch("layout", "--deepspeed", file, "model.vocab_size=512", "--ranks-per-node", "4")
    assert "64 samples of 256 tokens = 4 data-parallel x 2 micro-batches x 8 samples" in layout.stdout


@pytest.mark.parametrize(
    ("tree", "ranks", "sentence"),
    [
        ({**ZERO2, "optimiser": {}}, 2, "optimiser: DeepSpeed has no such key, did you mean optimizer"),
        (ZERO2, 3, "train_batch_size=16 is not train_micro_batch_size_per_gpu=2 x"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    trierarch: Trierarch, tmp_path: Path, tree: dict[str, Any], ranks: int, sentence: str
) -> None:
    done = trierarch("train", "--ranks", str(ranks), "--deepspeed", write(tmp_path, tree), *TOY)
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("trierarch: ds_config.json: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
