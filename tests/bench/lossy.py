"""What rounding before a save costs and saves: the loss of runs that continue from rounded steps.

    python tests/bench/lossy.py [--seeds 3] [--steps 120]

For each seed a run is trained to half of its steps, and continued from there three times: from the step as it was, from
one with rounded moments, and from one with rounded weights too. The losses of the second half, and of the evaluation at
its end, are compared: within 0.1 % is wanted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("moments", "all")


def trierarch(*arguments: str) -> None:
    """Run a command of ours on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.cli", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def train(root: Path, name: str, steps: int, seed: int) -> None:
    """Train a run to its end, from the step that it has."""
    trierarch(
        *("train", "--ranks", "1", "model=llama_3m", f"loop.steps={steps}", f"seed={seed}"),
        *("loop.global_batch_size=8", "parallel.micro_batch_size=8", "data.sequence_length=128"),
        *("loop.log_every_steps=1", "loop.eval_every_steps=0", "monitor.tensorboard=false"),
        *("checkpoint.every_minutes=0", f"checkpoint.every_steps={steps // 2}", "checkpoint.keep_last=0"),
        *(f"data.prefix={root / 'text'}", f"run.root={root}", f"run.name={name}"),
    )


def losses(run: Path, after: int) -> tuple[float, float]:
    """Mean loss of the steps after `after`, and that of the evaluation at the end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    own = [line["loss"] for line in lines if "loss" in line and line["step"] > after]
    return statistics.fmean(own), [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def main() -> None:
    """Train, continue, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    half = options.steps // 2
    worst = dict.fromkeys(KINDS, 0.0)
    print("seed  saved    of plain  mean loss after  eval loss  from exact  largest errors")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        trierarch("data", "prepare", "python-stdlib", "--train-bpe", "2048", "--prefix", str(root / "text"))
        for seed in range(1, options.seeds + 1):
            exact = root / f"exact{seed}"
            train(root, exact.name, options.steps, seed)
            reference = losses(exact, half)
            print(f"{seed:4}  exact      100.0%  {reference[0]:15.5f}  {reference[1]:9.5f}", flush=True)
            saved = exact / f"checkpoints/step_{half}"
            for kind in KINDS:
                run = root / f"{kind}{seed}"
                (run / "checkpoints").mkdir(parents=True)
                trierarch("ckpt", "compress", str(saved), "--lossy", kind, "--out", str(run / "checkpoints"))
                plain, rounded = (
                    json.loads((folder / "manifest.json").read_text())
                    for folder in (saved, run / f"checkpoints/step_{half}")
                )
                train(root, run.name, options.steps, seed)
                found = losses(run, half)
                apart = max(abs(a / b - 1) for a, b in zip(found, reference, strict=True))
                worst[kind] = max(worst[kind], apart)
                share = sum(rounded["files"].values()) / sum(plain["files"].values())
                errors = ", ".join(f"{role} {error:.4f}" for role, error in rounded["rounded"].items())
                print(
                    f"{seed:4}  {kind:8} {share:7.1%}  {found[0]:15.5f}  {found[1]:9.5f}  {apart:10.4%}  {errors}",
                    flush=True,
                )
    for kind, apart in worst.items():
        print(f"{kind}: at most {apart:.4%} from exact (0.1 % is wanted)")


if __name__ == "__main__":
    main()
