"""Commands that store steps anew, killed at random moments: the step is whole, and the next command goes through."""

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from harness.compressing import hashes, killed_after, small_steps

from tools.ckpt.compress import Compressor
from tools.ckpt.findings import Severity
from tools.ckpt.validate import validate

KILLS = 120


@pytest.mark.req("C9")
def test_a_step_is_whole_whenever_a_command_is_killed(tmp_path: Path, session_seed: int) -> None:
    chance = random.Random(session_seed)
    steps = small_steps(tmp_path / "run", 3, 200_000)
    wanted = [hashes(step) for step in steps]
    oldest, middle, newest = steps
    works = {
        "compress": lambda: Compressor().compress(middle),
        "delta": lambda: Compressor().delta(middle, oldest),
        "another parent": lambda: Compressor().delta(middle, newest),
        "restore": lambda: Compressor().restore(middle),
    }
    seen: Counter[str] = Counter()
    took_s = dict.fromkeys(works, 0.5)
    for number in range(KILLS):
        name = chance.choice(list(works))
        done = killed_after(chance.uniform(0, 1.2 * took_s[name]), works[name])
        left = sum(one.severity is Severity.WARNING for one in validate(middle).findings)
        seen[f"{name}: {'done' if done else 'killed, files left' if left else 'killed'}"] += 1
        for step, before in zip(steps, wanted, strict=True):
            report = validate(step)
            assert report.exit_code == 0, (number, name, report)
            assert hashes(step) == before, (number, name)
        if chance.random() < 0.5:
            began_s = time.monotonic()
            changed = works[name]().changed
            took_s[name] = time.monotonic() - began_s if changed else took_s[name]
            report = validate(middle)
            assert report.exit_code == 0, (number, name, report)
            assert not [one for one in report.findings if one.severity is Severity.WARNING], (number, name)
    print(dict(sorted(seen.items())))
    assert sum(count for name, count in seen.items() if "killed" in name) > KILLS // 4
    shutil.rmtree(tmp_path / "run")
