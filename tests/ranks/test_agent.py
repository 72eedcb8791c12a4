"""The agent of a node: a real one over its pipes, with real ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.agent import Agent, write_run
from harness.command import wait_until
from harness.toy import toy_overrides
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from contract.agent import Reply, Request, Task
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines
from train.resilience.process import process_state

pytestmark = pytest.mark.slow

STEPS = 30
LONG = "loop.steps=100000"
STOP_SIGNALS = [signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]


@pytest.fixture(scope="module")
def shared_agent() -> Iterator[Agent]:
    # Where it finds the program of a test.
    agent = Agent(PYTHONPATH=f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}")
    assert agent.wait_for(Reply.READY)["cpus"] == sorted(os.sched_getaffinity(0))
    yield agent
    agent.close()


@pytest.fixture
def agent(shared_agent: Agent) -> Iterator[Agent]:
    """An agent without ranks, used by one test after the other."""
    yield shared_agent
    shared_agent.kill_ranks()


@pytest.fixture
def own_agent() -> Iterator[Agent]:
    agent = Agent()
    agent.wait_for(Reply.READY)
    yield agent
    agent.close()


def toy_run(tokens: Path, folder: Path, name: str, *more: str) -> RunFolder:
    return write_run(toy_overrides(tokens, folder, name, *more))


def events(run: RunFolder, kind: Event) -> list[dict[str, object]]:
    return [event for event in run.read_events() if event["event"] == kind]


def weights(run: RunFolder, folder: Path) -> dict[str, torch.Tensor]:
    target = folder / f"{run.name}.pt"
    dcp_to_torch_save(run.checkpoints / f"step_{run.published_steps()[-1]}", target)
    return dict(torch.load(target, weights_only=True)["model"])


def assert_same_result(one: RunFolder, other: RunFolder, folder: Path) -> None:
    def lines(run: RunFolder) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in read_json_lines(run.metrics) if "loss" in line]

    assert lines(one) == lines(other)
    assert len(lines(one)) == STEPS
    left, right = weights(one, folder), weights(other, folder)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def threads(agent: Agent) -> int:
    return len(list(Path(f"/proc/{agent.process.pid}/task").iterdir()))


def is_held_back(agent: Agent, number: signal.Signals) -> bool:
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    return bool(int(re.findall(r"SigBlk:\s+(\w+)", status)[0], 16) >> (number - 1) & 1)


def in_steps(pulses: dict[int, dict[str, object]]) -> bool:
    return all(rank["phase"] == "step" for rank in pulses.values())


@pytest.mark.req("C12", "A17")
def test_a_killed_rank_costs_no_result(agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    calm = toy_run(toy_tokens, tmp_path, "calm", f"loop.steps={STEPS}")
    agent.start(calm, 2)
    assert agent.codes(2) == {0: 0, 1: 0}
    assert calm.finished.exists()

    stormy = toy_run(toy_tokens, tmp_path, "stormy", f"loop.steps={STEPS}", "checkpoint.every_steps=5")
    agent.start(stormy, 2)
    agent.wait_until("a checkpoint", lambda _: bool(stormy.published_steps()))
    os.kill(agent.pulse()[1]["pid"], signal.SIGKILL)
    ended = agent.wait_for(Reply.EXITED)
    assert (ended["attempt"], ended["rank"], ended["code"]) == ("0", 1, -signal.SIGKILL)
    agent.kill_ranks()
    agent.start(stormy, 2, number=1)
    assert agent.codes(2) == {0: 0, 1: 0}
    assert_same_result(calm, stormy, tmp_path)

    (resumed,) = events(stormy, Event.RESUMED)
    assert resumed["start"] == 1
    assert resumed["load_s"] > 0  # type: ignore[operator]
    assert [event["start"] for event in events(stormy, Event.STARTED)] == [0, 1]
    assert all(event["seconds"] > 0 for event in events(stormy, Event.SAVED))  # type: ignore[operator]
    assert "2 ranks started by an agent, on the CPU" in (stormy.logs / "local.r0-1.0.log").read_text()


@pytest.mark.req("C12")
def test_two_nodes_are_one_world(agent: Agent, own_agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    run = toy_run(toy_tokens, tmp_path, "two", f"loop.steps={STEPS}")
    lo = {"environment": {"GLOO_SOCKET_IFNAME": "lo"}}
    master = agent.listen()
    for number, node in enumerate((agent, own_agent)):
        node.start(
            run, 4, nodes=2, node_rank=number, first_rank=2 * number, local_size=2, master=master, **lo
        )
    assert agent.codes(2) == {0: 0, 1: 0}
    assert own_agent.codes(2) == {2: 0, 3: 0}
    assert (
        "4 ranks started by an agent on each of 2 nodes, on the CPU"
        in (run.logs / "local.r0.0.log").read_text()
    )


@pytest.mark.req("C12")
def test_a_stop_signal_reaches_the_ranks_once_and_the_agent_lives(
    agent: Agent, toy_tokens: Path, tmp_path: Path
) -> None:
    run = toy_run(toy_tokens, tmp_path, "stopped", LONG)
    agent.start(run, 2)
    agent.wait_until("training", in_steps)
    for number in STOP_SIGNALS:
        agent.process.send_signal(number)
    assert agent.wait_for(Reply.STOPPING)["signal"] in {number.name for number in STOP_SIGNALS}
    assert agent.codes(2) == {0: ExitCode.STOPPED, 1: ExitCode.STOPPED}
    assert agent.pulse() == {}
    assert not agent.has_said(Reply.STOPPING)
    assert run.published_steps()
    assert events(run, Event.STOPPED)


def test_a_stop_signal_that_comes_at_once_is_not_lost(agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    """A rank that has no handler yet must neither die of the signal nor forget it."""
    run = toy_run(toy_tokens, tmp_path, "early", LONG)
    agent.start(run, 2)
    agent.ask(Request.SIGNAL, number=signal.SIGUSR2)
    assert agent.codes(2) == {0: ExitCode.STOPPED, 1: ExitCode.STOPPED}


@pytest.mark.req("C12")
def test_an_agent_that_is_asked_to_stop_while_it_imports_tells_when_it_has_done_so() -> None:
    """A node must not count as broken because its job was pre-empted at once."""
    agent = Agent()
    try:
        wait_until("the signals to be held back", lambda: is_held_back(agent, signal.SIGTERM))
        agent.process.terminate()
        agent.wait_for(Reply.READY)
        assert agent.wait_for(Reply.STOPPING)["signal"] == "SIGTERM"
    finally:
        agent.close()


@pytest.mark.req("C12")
def test_without_its_supervisor_an_agent_ends_its_ranks_and_carries_out_the_will(
    own_agent: Agent, toy_tokens: Path, tmp_path: Path
) -> None:
    run = toy_run(toy_tokens, tmp_path, "orphans", LONG)
    own_agent.start(run, 2)
    pids = [rank["pid"] for rank in own_agent.wait_until("training", in_steps).values()]
    written = tmp_path / "will"
    own_agent.ask(Request.WILL, command=["sh", "-c", f"sleep 0.3; echo $$ > {written}"], delay_s=0.1)
    own_agent.pulse()
    own_agent.requests.close()
    assert own_agent.process.wait(timeout=30) != 0
    assert all(process_state(pid) in "XZ" for pid in pids)
    assert written.exists(), "the agent waits for the end of the command"
    assert "the supervisor is gone, ending the ranks" in own_agent.errors()


def test_told_to_quit_it_ends_the_ranks_and_forgets_the_will(
    own_agent: Agent, toy_tokens: Path, tmp_path: Path
) -> None:
    assert threads(own_agent) == 1, "a fork copies one thread only"
    own_agent.start(toy_run(toy_tokens, tmp_path, "quit", LONG), 2)
    pids = [rank["pid"] for rank in own_agent.pulse().values()]
    own_agent.ask(Request.WILL, command=["touch", str(tmp_path / "will")], delay_s=0)
    own_agent.ask(Request.QUIT)
    assert own_agent.process.wait(timeout=30) == 0
    wait_until("the ranks' end", lambda: all(process_state(pid) in "XZ" for pid in pids))
    assert not (tmp_path / "will").exists()


@pytest.mark.req("C12", "A17")
def test_a_stopped_rank_is_seen_and_everybodys_stack_is_written(
    agent: Agent, toy_tokens: Path, tmp_path: Path
) -> None:
    run = toy_run(toy_tokens, tmp_path, "hung", LONG, "resilience.step_timeout_s=123")
    agent.start(run, 2)
    pids = agent.wait_until("training", in_steps)
    os.kill(pids[1]["pid"], signal.SIGSTOP)
    silent = agent.wait_until("silence", lambda ranks: all(rank["silent_s"] > 0.5 for rank in ranks.values()))
    assert (silent[1]["state"], silent[1]["phase"], silent[1]["limit_s"]) == ("T", "step", 123)
    agent.ask(Request.STACKS)
    # The agent goes on meanwhile.
    assert agent.pulse()[1]["silent_s"] > silent[1]["silent_s"]
    told = {rank["rank"]: rank for rank in agent.wait_for(Reply.STACKS)["ranks"]}
    assert told[1]["state"] == "T"
    assert told[0]["state"] != "T"
    answered, stopped = ((run.logs / f"local.r0.{rank}.log").read_text() for rank in range(2))
    assert "Current thread 0x" in answered
    assert "train/loop.py" in answered
    assert "does not answer; py-spy" in stopped
    assert "train (train/loop.py" in stopped or "trierarch: py-spy" in stopped


def test_a_rank_is_bound_to_its_cpus_and_holds_nothing_of_the_agents(
    agent: Agent, toy_tokens: Path, tmp_path: Path
) -> None:
    mine = sorted(os.sched_getaffinity(0))
    agent.start(toy_run(toy_tokens, tmp_path, "bound", LONG), 1, cpus=[mine[:1]])
    pid = agent.wait_until("training", in_steps)[0]["pid"]
    assert os.sched_getaffinity(pid) == {mine[0]}
    channel = {os.fstat(stream.fileno()).st_ino for stream in (agent.requests, agent.replies)}
    held = [entry.stat() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    assert not channel & {status.st_ino for status in held}
    assert threads(agent) == 1


def test_an_error_of_the_users_ends_up_in_the_log(agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    run = toy_run(toy_tokens, tmp_path, "wrong")
    run.config.write_text(run.config.read_text().replace("steps: 1000", "steps: -1"))
    agent.start(run, 2)
    assert agent.codes(2) == {0: ExitCode.CONFIG, 1: ExitCode.CONFIG}
    assert "loop.steps=-1: must be above 0" in (run.logs / "local.r0.0.log").read_text()


def test_requests_that_cannot_be_carried_out_are_told(agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    run = toy_run(toy_tokens, tmp_path, "refused", LONG)
    agent.start(run, 1, master="127.0.0.1:1")
    assert "rank 0 needs a port" in agent.wait_for(Reply.ERROR)["message"]
    agent.ask(Request.START, attempt="0")
    assert "start: TypeError" in agent.wait_for(Reply.ERROR)["message"]
    agent.requests.write(b'hello\n{"kind": "sing"}\n')
    agent.requests.flush()
    assert {agent.wait_for(Reply.ERROR)["message"] for _ in range(2)} == {
        "no request: hello",
        "sing: ValueError: 'sing' is not a valid Request",
    }
    agent.start(run, 1)
    agent.start(run, 1)
    assert "still there" in agent.wait_for(Reply.ERROR)["message"]


@pytest.mark.req("C12")
def test_the_all_reduce_of_ranks_that_reach_each_other(agent: Agent, tmp_path: Path) -> None:
    agent.start(RunFolder(tmp_path), 2, task=Task.ALL_REDUCE, config=None, timeout_s=50)
    assert agent.codes(2) == {0: 0, 1: 0}


@pytest.mark.req("C12")
def test_the_all_reduce_without_a_peer_is_bounded(agent: Agent, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    agent.start(run, 2, task=Task.ALL_REDUCE, config=None, timeout_s=2, local_size=1)
    assert agent.codes(1) == {0: ExitCode.PEER_FAILED}
    log = (run.logs / "local.r0.0.log").read_text()
    assert "failed the all-reduce test: rank 1 of 2 did not come" in log or "did not finish" in log


@pytest.mark.req("C10", "C12")
def test_ranks_run_a_program_and_leave_with_its_code(agent: Agent, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    program = {"task": Task.PROGRAM, "config": None, "program": "harness.program_of_ranks"}
    agent.start(run, 2, **program, arguments=["7"])
    assert agent.codes(2) == {0: 7, 1: 7}
    assert (run.logs / "local.r0.1.log").read_text() == "rank 1 of 2\n"
    agent.start(run, 1, **program, arguments=["no number"])
    assert agent.codes(1) == {0: ExitCode.CONFIG}
    assert (run.logs / "local.r0.0.log").read_text().endswith("trierarch: no number: give one\n")
    agent.start(run, 1, **program | {"program": None})
    assert "program is missing" in agent.wait_for(Reply.ERROR)["message"]
    # Nothing holds it back from ending at once.
    agent.start(run, 1, **program, arguments=["sleep"])
    agent.wait_until("a sleeping rank", lambda pulses: "asleep" in (run.logs / "local.r0.0.log").read_text())
    agent.ask(Request.SIGNAL, number=int(signal.SIGUSR2))
    assert agent.codes(1) == {0: -signal.SIGUSR2}


@pytest.mark.req("C12")
def test_the_health_check_of_a_node(agent: Agent, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("written by n1\n")
    wanted = {"marker": {"path": str(marker), "text": "written by n1"}, "gpus": 0, "gpu_memory_gb": None}
    agent.ask(Request.CHECK, folders={str(tmp_path): 1}, **wanted)
    health = agent.wait_for(Reply.HEALTH)
    assert health["problems"] == []
    assert abs(health["time_s"] - time.time()) < 60
    agent.ask(
        Request.CHECK,
        folders={str(tmp_path): 10**18, "/no/such": 1},
        temporary_bytes=10**18,
        **wanted | {"gpus": None},
    )
    full, missing, temporary = agent.wait_for(Reply.HEALTH)["problems"]
    assert f"{tmp_path} has " in full and f"{tempfile.gettempdir()} has " in temporary
    assert "/no/such cannot be used (No such file or directory)" in missing


def test_the_run_is_owned_by_the_start_that_came_last(agent: Agent, toy_tokens: Path, tmp_path: Path) -> None:
    """A start of the same job that came earlier is dead, wherever it ran."""
    run = toy_run(toy_tokens, tmp_path, "again", f"loop.steps={STEPS}")
    owner = {
        "token": "old",
        "host": "elsewhere",
        "pid": 1,
        "started": "1",
        "job": "7",
        "restart": 0,
        "start": 0,
    }
    run.owner.write_text(json.dumps(owner))
    agent.start(run, 1, number=1, environment={"SLURM_JOB_ID": "7"})
    began = time.monotonic()
    assert agent.codes(1) == {0: 0}
    assert time.monotonic() - began < 60


IMPATIENT = """
import contract.agent
from train import agent
from train.resilience import preload
preload.PRELOADED = ("noisy", *preload.PRELOADED, "short")
contract.agent.LEASE_S = 3.0
agent.leave(agent.main())
"""
NOISY = """
import os
print("hello")
os.write(1, b'{"kind": "fake"}\\n')
"""


@pytest.mark.req("C12")
def test_what_hangs_is_bounded_and_what_is_printed_does_not_reach_the_channel(tmp_path: Path) -> None:
    """One agent with short limits: a check that hangs, then a supervisor that says nothing any more."""
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "short.py").write_text("from train.resilience import node\nnode.CHECK_S = 1.0\n")
    os.mkfifo(tmp_path / "marker")
    agent = Agent(["-u", "-c", IMPATIENT], PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    try:
        agent.wait_for(Reply.READY)
        agent.ask(Request.WILL, command=["touch", str(tmp_path / "will")], delay_s=0)
        marker = {"path": str(tmp_path / "marker"), "text": "never"}
        agent.ask(Request.CHECK, marker=marker, folders={}, gpus=None, gpu_memory_gb=None)
        (problem,) = agent.wait_for(Reply.HEALTH)["problems"]
        assert "did not end within 1 s" in problem
        assert agent.process.wait(timeout=30) != 0
        errors = agent.errors()
        assert "nothing was heard of the supervisor for 3 s" in errors
        assert (tmp_path / "will").exists()
        assert (agent.noise, agent.replies.read()) == ([], b"")
        assert "hello" in errors
        assert '"fake"' in errors
    finally:
        agent.close()


def test_ranks_may_use_all_cores_though_openmp_is_told_to_bind() -> None:
    code = """
import os
from train.resilience.preload import preload
cpus = os.sched_getaffinity(0)
preload()
assert os.sched_getaffinity(0) == cpus, os.sched_getaffinity(0)
assert os.environ["OMP_PROC_BIND"] == "true"
"""
    environ = {**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environ)


def test_importing_what_ranks_need_touches_no_device() -> None:
    """After the driver was touched no forked rank can use a GPU."""
    code = """
import sys
import train.agent
assert "torch" not in sys.modules, "before the channel is out of its reach"
from train.resilience.preload import preload
import torch
def touched(*args): raise AssertionError("a device was touched")
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device"):
    setattr(torch.cuda, name, touched)
preload()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
