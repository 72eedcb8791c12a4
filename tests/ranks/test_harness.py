"""The `ranks` fixture itself: results, failures, hangs, deaths, and a clean state for each call."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.composed import composed
from harness.pool import MAX_RANKS, Ranks, RanksError
from harness.scheduling import TOGETHER
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from contract.errors import ConfigError
from train.config import load_config


@dataclass(frozen=True)
class Answer:
    rank: int
    total: torch.Tensor


def summed(value: torch.Tensor, *, factor: int = 1) -> Answer:
    total = value * (dist.get_rank() + 1) * factor
    dist.all_reduce(total)
    return Answer(dist.get_rank(), total)


def wait_for(path: Path) -> None:
    """Wait inside a rank: the limit of the call is the bound."""
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_back_in_rank_order(ranks: Ranks, size: int) -> None:
    answers = ranks(size, summed, torch.ones(3, dtype=torch.bfloat16), factor=2)
    assert [answer.rank for answer in answers] == list(range(size))
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.total.dtype == torch.bfloat16
        assert answer.total.tolist() == [size * (size + 1)] * 3


def test_closures_go_through(ranks: Ranks) -> None:
    offset = torch.arange(4)

    def shifted() -> torch.Tensor:
        return offset[dist.get_rank()] + 10

    assert ranks(4, shifted) == [10, 11, 12, 13]


def test_ranks_stay_alive_between_calls(ranks: Ranks) -> None:
    pids = ranks(4, os.getpid)
    assert len(set(pids)) == 4
    assert ranks(4, os.getpid) == pids
    assert ranks(2, os.getpid) == pids[:2]


@settings(max_examples=10)
@given(size=st.integers(1, 4), values=st.lists(st.integers(-100, 100), min_size=1, max_size=5))
def test_works_under_hypothesis(ranks: Ranks, size: int, values: list[int]) -> None:
    for answer in ranks(size, summed, torch.tensor(values)):
        assert answer.total.tolist() == [value * size * (size + 1) // 2 for value in values]


def test_a_size_out_of_range_is_refused(ranks: Ranks) -> None:
    for size in (0, MAX_RANKS + 1):
        with pytest.raises(ValueError, match=f"1 to {MAX_RANKS}"):
            ranks(size, os.getpid)


def test_a_failure_shows_every_rank(ranks: Ranks, session_seed: int, tmp_path: Path) -> None:
    def fail_on_some() -> None:
        print(f"hello from {dist.get_rank()}")
        if dist.get_rank() == 0:
            return
        if dist.get_rank() < 3:
            wait_for(tmp_path / "ready")
            raise KeyError(f"broken-{dist.get_rank()}")
        (tmp_path / "ready").touch()
        dist.barrier()

    with pytest.raises(RanksError) as caught:
        ranks(4, fail_on_some, timeout_s=10)
    text = str(caught.value)
    assert f"seed {session_seed}" in text
    for rank in (1, 2):
        assert f"rank {rank} failed" in text
        assert f"KeyError: 'broken-{rank}'" in text
    assert text.count("in fail_on_some") == 3  # two tracebacks and the stack of the rank that waits
    assert text.count(__file__) == 3
    assert text.count('raise KeyError(f"broken-{dist.get_rank()}")') == 2
    assert "rank 3 was still running" in text
    assert "in barrier" in text
    assert "hello from 0" in text
    assert "harness/" not in text
    assert [answer.rank for answer in ranks(4, summed, torch.ones(1))] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, pytest.fail.Exception])
def test_any_kind_of_exception_is_a_failure(ranks: Ranks, error: type[BaseException]) -> None:
    def leave() -> None:
        raise error("on purpose")

    with pytest.raises(RanksError, match="on purpose"):
        ranks(1, leave, timeout_s=10)


def test_arguments_and_results_that_do_not_pickle_are_reported(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="cannot pickle"):
        ranks(1, lambda: sys._getframe(), timeout_s=10)
    with pytest.raises(TypeError, match="cannot pickle"):
        ranks(1, summed, sys._getframe())
    assert len(ranks(1, os.getpid)) == 1


def test_a_hang_is_ended_and_the_next_call_works(ranks: Ranks) -> None:
    def hang() -> None:
        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))

    before = ranks(2, os.getpid)
    with pytest.raises(RanksError) as caught:
        ranks(2, hang, timeout_s=2.5)
    text = str(caught.value)
    assert "[0, 1] were still running" in text
    assert "in all_reduce" in text
    assert text.count("in hang") == 2
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    after = ranks(2, os.getpid)
    assert not set(after) & set(before)
    assert ranks(2, summed, torch.ones(1))[0].total == 3


def test_a_stopped_process_is_ended(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="does not answer"):
        ranks(1, lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout_s=0.5)
    assert len(ranks(1, os.getpid)) == 1


def test_children_of_a_failed_rank_are_ended(ranks: Ranks, tmp_path: Path) -> None:
    def start_child() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        (tmp_path / "pid").write_text(str(child.pid))
        raise RuntimeError

    with pytest.raises(RanksError):
        ranks(1, start_child, timeout_s=10)
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end = time.monotonic() + 5
    while stat.exists() and stat.read_text().split()[2] != "Z":  # a container's init may not reap it
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("die", "how"),
    [
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (os.abort, "SIGABRT\nFatal Python error: Aborted"),
    ],
)
def test_a_death_is_noticed_at_once_and_replaced(
    ranks: Ranks, tmp_path: Path, die: Callable[[], object], how: str
) -> None:
    def die_on_1() -> None:
        if dist.get_rank() == 1:
            wait_for(tmp_path / "ready")
            print("last words")
            die()
        (tmp_path / "ready").touch()
        time.sleep(1000)

    with pytest.raises(RanksError) as caught:
        ranks(2, die_on_1, timeout_s=100)  # far beyond the limit of the suite if it were waited for
    text = str(caught.value)
    assert f"rank 1 failed: its process ended with {how}" in text
    assert "rank 0 was still running" in text
    assert "last words" in text
    assert ranks(2, summed, torch.ones(1))[0].total == 3


def test_an_idle_rank_that_dies_is_replaced(ranks: Ranks) -> None:
    """Between calls nobody looks: the next call must say so rather than hang."""
    pids = ranks(2, os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RanksError, match="rank 1 failed: its process ended with SIGKILL"):
        ranks(2, summed, torch.ones(1), timeout_s=10)
    assert ranks(2, summed, torch.ones(1))[0].total == 3


def test_state_does_not_leak_between_calls(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def state() -> dict[str, object]:
        return {
            "random": (random.random(), np.random.rand(), torch.rand(1).item()),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "device": torch.empty(1).device.type,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
            "environment": {k: v for k, v in os.environ.items() if k.startswith("HARNESS_")},
            "folder": Path.cwd(),
            "signal": signal.getsignal(signal.SIGUSR2),
        }

    def disturb() -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        os.environ["HARNESS_LEAK"] = "1"
        os.chdir("/")
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_GIVEN", "yes")
    pid = ranks(1, os.getpid)
    before = ranks(1, state)
    assert before[0]["environment"] == {"HARNESS_GIVEN": "yes"}
    assert before[0]["folder"] == tmp_path
    ranks(1, disturb)
    assert ranks(1, state) == before
    assert ranks(1, os.getpid) == pid


def test_groups_of_an_earlier_call_are_forgotten(ranks: Ranks) -> None:
    """DTensor caches plans by mesh: an equal mesh of a later call has other groups."""

    def sharded_sum(other_groups: int) -> bool:
        for _ in range(other_groups):
            dist.new_group([0])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        torch.manual_seed(0)
        whole = torch.randn(4, 6)
        part: Any = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        return torch.equal(
            (part @ part.T).full_tensor().round(decimals=4), (whole @ whole.T).round(decimals=4)
        )

    for other_groups in (0, 3, 1):
        assert ranks(4, sharded_sum, other_groups) == [True] * 4


def test_output_of_a_good_call_is_not_shown(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(2, lambda: print("noise"))
    assert capfd.readouterr() == ("", "")


def test_a_requirement_that_is_not_in_the_ledger_fails_collection(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = req(id, ...): rows\n")
    test = tmp_path / "test_one.py"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", str(tmp_path)]
    for mark, code in {'"A25", "D8"': 0, '"A25", "A26"': 4}.items():
        test.write_text(f"import pytest\n@pytest.mark.req({mark})\ndef test(): pass\n")
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == code, run.stdout
        assert ("test_one.py::test: req(" in run.stderr) == bool(code)


def test_ranks_with_the_same_settings_compose_them_once_and_get_the_same_error(ranks: Ranks) -> None:
    def compose(*settings: str) -> tuple[str, int]:
        with mock.patch("harness.composed.load_config", wraps=load_config) as load:
            name = composed([settings[dist.get_rank() % len(settings)]]).run.name
        return name, load.call_count

    assert ranks(3, compose, "run.name=one") == [("one", 1), ("one", 0), ("one", 0)]
    assert ranks(3, compose, "run.name=one", "run.name=two") == [("one", 1), ("two", 1), ("one", 0)]

    def refused() -> None:
        with pytest.raises(ConfigError, match="there is no such key"):
            composed(["run.nmae=one"])

    ranks(2, refused)


@pytest.mark.slow
def test_one_process_takes_all_tests_of_a_place_whose_tests_share_much(tmp_path: Path) -> None:
    """Seen in what pytest does: groups of xdist's own have been without effect and without a word."""
    tests = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = --import-mode=importlib\npythonpath = {tests}\n"
    )
    places = [f"{place}test_one.py" if place.endswith("/") else place for place in TOGETHER]
    for place in [*places, "tests/unit/test_one.py"]:
        assert (tests.parent / place).parent.exists()
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("".join(f"def test_{number}(): pass\n" for number in range(4)))
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist=loadgroup"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    for place in places:
        processes = re.findall(rf"^\[(gw\d)\] .* {place}", run.stdout, re.MULTILINE)
        assert len(processes) == 4 and len(set(processes)) == 1, run.stdout
