"""How much of a bare torch loop's speed `trierarch train` keeps: at least 0.97 is wanted.

    python tests/bench/loop_overhead.py [--rounds 5]

One rank, one thread, the same model, batch, optimizer and precision. Ours is the real command, timed by the
metrics that it logs; the bare loop is below. They take turns, because machines are noisy: the median of the
ratios of neighbours is what counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, SKIP = 60, 20
OVERRIDES = [
    "model=llama_3m",
    f"loop.steps={STEPS}",
    "loop.global_batch_size=8",
    "parallel.micro_batch_size=4",
    "loop.log_every_steps=10",
    "loop.eval_batches=0",
    "checkpoint.every_minutes=0",
]


def bare() -> float:
    """Tokens/s of a loop that does nothing but train."""
    import torch
    import torch.nn.functional as F

    from train.config import load_config
    from train.model.llama import build

    torch.set_num_threads(1)
    config = load_config(OVERRIDES)
    config.model.vocab_size = 2048
    model = build(config.model, 0, torch.device("cpu"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    micro, length = 4, config.data.sequence_length
    data = torch.randint(0, 2048, (64, micro, length + 1))
    for step in range(STEPS):
        if step == SKIP:
            started_s = time.perf_counter()
        for index in range(2):
            batch = data[(2 * step + index) % len(data)]
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (STEPS - SKIP) * 2 * micro * length / (time.perf_counter() - started_s)


def ours(folder: Path, prefix: Path, name: str) -> float:
    """Tokens/s of `trierarch train` on one rank, by its own metrics."""
    command = [sys.executable, "-m", "tools.cli", "train", "--ranks", "1", *OVERRIDES]
    command += [f"run.root={folder}", f"run.name={name}", f"data.prefix={prefix}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    times = [line["step_time_s"] for line in lines if line["step"] > SKIP]
    return 8 * 256 / statistics.mean(times)


def main() -> None:
    """Take turns and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="measure the bare loop once and print it")
    options = parser.parse_args()
    if options.bare:
        print(bare())
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare = [
            sys.executable,
            "-m",
            "tools.cli",
            "data",
            "prepare",
            "python-stdlib",
            "--train-bpe",
            "2048",
        ]
        subprocess.run([*prepare, "--prefix", str(folder / "text")], check=True, capture_output=True)
        ratios = []
        for number in range(options.rounds):
            reference = float(
                subprocess.run(
                    [sys.executable, __file__, "--bare"],
                    check=True,
                    capture_output=True,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                ).stdout
            )
            own = ours(folder, folder / "text", f"run{number}")
            ratios.append(own / reference)
            print(
                f"bare {reference:,.0f} tokens/s, trierarch {own:,.0f} tokens/s: {ratios[-1]:.3f}", flush=True
            )
    print(f"median ratio {statistics.median(ratios):.3f} (wanted: at least 0.97)")


if __name__ == "__main__":
    main()
