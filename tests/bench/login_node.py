"""How long a login node waits for an answer: whole process, warm; under 0.5 s is wanted.

    python tests/bench/login_node.py [--rounds 10]

Each command is set against a bare `python -c pass` in the same run.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [str(Path(sys.executable).with_name("trierarch"))]
CASES = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "trierarch submit --dry-run": [*COMMAND, "submit", "--dry-run", "cluster=local"],
    "trierarch status": [*COMMAND, "status"],
    "trierarch train --cfg job": [*COMMAND, "train", "--cfg", "job"],
    "trierarch --help": [*COMMAND, "--help"],
}


def main() -> None:
    """Measure every command in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name, command in CASES.items():
                started_s = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=os.environ)
                if number > 0:  # the first warms the caches
                    times[name].append(time.perf_counter() - started_s)
    bare = statistics.median(times["python -c pass"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{name:28} median {median:.3f} s, slowest {max(seconds):.3f} s, {median / bare:.0f} x bare python"
        )


if __name__ == "__main__":
    main()
