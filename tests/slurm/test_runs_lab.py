"""status, logs, cancel and resubmit against a real Slurm without accounting."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from harness.command import COMMAND
from harness.slurm_lab import TRAINER, SlurmLab, launch_shell_trainer, wait_until
from harness.toy import LOOP, MODEL, QUIET, REST

from contract.run_folder import Event, RunFolder, last_json_line, read_json_lines
from slurm.runs.status import RunState, RunStatus, status
from slurm.snapshot import snapshot

# Writes what `logs` shows; else the shell trainer.
TALKER = TRAINER.replace(
    "  step=$((step + 1))\n", '  step=$((step + 1)); echo "step $step of $SLURM_PROCID"\n'
)


def make(root: Path, name: str) -> RunFolder:
    run = RunFolder(root / name)
    run.create()
    return run


def submit(lab: SlurmLab, run: RunFolder, script: str, *options: str) -> str:
    """Queue a script of a run that leaves no word of itself; returns the job's id."""
    job = lab.submit(script, "--partition=low", "--requeue", *options, folder=run.path)
    run.append_event(Event.SUBMITTED, job_id=job, scheduler="slurm", slurm_conf=lab.environment["SLURM_CONF"])
    return job


def seen(run: RunFolder) -> RunStatus:
    (one,) = status(run.path)
    return one


def told(run: RunFolder) -> list[str]:
    return [event["event"] for event in run.read_events()]


def trierarch(lab: SlurmLab, root: Path, *words: str, code: int = 0) -> str:
    """What the command says, run beside the folder `runs`."""
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=root.parent,
        env={**lab.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.mark.req("D6", "C12")
def test_the_ends_of_jobs_are_told_apart_without_accounting(lab: SlurmLab, root: Path) -> None:
    ends = {
        "timeout": ("--nodelist=n1", "--no-requeue", "--time=2"),
        "node": ("--nodelist=n4", "--no-requeue"),
        "preempted": ("--nodelist=n2", "--no-requeue"),
        "cancelled": ("--nodelist=n1",),
        "requeued": ("--nodelist=n3",),
    }
    runs = {name: make(root, name) for name in ends}
    jobs = {name: submit(lab, runs[name], "sleep 100", *options) for name, options in ends.items()}
    runs["failed"] = make(root, "failed")
    jobs["failed"] = submit(lab, runs["failed"], "exit 3", "--nodelist=n3")
    for name in ends:
        assert wait_until(lambda name=name: seen(runs[name]).state is RunState.running, 20), name
    lab.run("scontrol", "update", f"JobId={jobs['timeout']}", "EndTime=now+1")
    lab.cluster.stop("n4")
    lab.run("sbatch", "--partition=high", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=true")
    lab.run("scancel", jobs["cancelled"])
    lab.run("scontrol", "requeue", jobs["requeued"])
    assert wait_until(lambda: seen(runs["requeued"]).state is RunState.queued, 20)

    expected = {
        "timeout": ("TIMEOUT", RunState.lost, "reached its time limit and was not requeued"),
        "node": ("NODE_FAIL", RunState.lost, "lost a node and was not requeued"),
        "preempted": ("PREEMPTED", RunState.lost, "was pre-empted and not requeued"),
        "cancelled": ("CANCELLED", RunState.stopped, f"job {jobs['cancelled']} ended as CANCELLED"),
        "failed": ("FAILED", RunState.lost, "left no word"),
    }
    for name, (word, state, reason) in expected.items():
        lab.wait_for_state(jobs[name], {word}, 60)
        assert seen(runs[name]).state is state and reason in seen(runs[name]).reason, seen(runs[name])
    text = trierarch(lab, root, "status", "--state", "lost,stopped")
    assert len(text.splitlines()) == 6 and "NODE_FAIL: job" in text
    # No accounting, and Slurm forgets what has ended after a while: from then on the run folder speaks.
    objects = json.loads(trierarch(lab, root, "status", "--json", "runs/node"))
    assert [(one["state"], one["job"]) for one in objects] == [("lost", jobs["node"])]


@pytest.mark.req("C12")
def test_tasks_of_an_array_are_seen_one_by_one_and_cancelled_together(lab: SlurmLab, root: Path) -> None:
    sweep = root / "lr"
    tasks = [make(sweep, f"lr={index}") for index in range(4)]
    manifest = {"name": "lr", "created": 0, "keys": ["lr"], "base": [], "settings": {}, "waiting": []}
    manifest["tasks"] = [{"index": i, "run": f"lr={i}", "overrides": [], "values": {}} for i in range(4)]
    manifest["arrays"] = []
    (sweep / "sweep.json").write_text(json.dumps(manifest))
    script = f'echo \'{{"event": "started"}}\' >> {sweep}/lr=$SLURM_ARRAY_TASK_ID/events.jsonl; sleep 100'
    array = lab.submit(script, "--array=0-3%2", folder=sweep)
    other = lab.submit("sleep 100", folder=root)
    for index, task in enumerate(tasks):
        conf = lab.environment["SLURM_CONF"]
        task.append_event(Event.SUBMITTED, job_id=f"{array}_{index}", scheduler="slurm", slurm_conf=conf)

    def states() -> list[str]:
        return [one.state for one in status(sweep)]

    assert wait_until(lambda: states() == ["running", "running", "queued", "queued"], 20), status(sweep)
    assert "sweep of 4: 2 queued, 2 running" in trierarch(lab, root, "status")
    assert "lr/lr=3" in trierarch(lab, root, "status", "lr")

    assert "would end the jobs of 4 runs: give --yes" in trierarch(lab, root, "cancel", "lr", code=78)
    text = trierarch(lab, root, "cancel", "lr/lr=3")
    assert f"job {array}_3 waited in the queue" in text
    assert states() == ["running", "running", "queued", "stopped"]
    text = trierarch(lab, root, "cancel", "lr", "--now", "--yes")
    assert text.count("is ended at once") == 2 and text.count("waited in the queue") == 1
    assert "1 of 4 runs have no live job" in text
    assert wait_until(lambda: states() == ["stopped"] * 4, 20), status(sweep)
    assert lab.job(other)["JobState"] == "RUNNING"


@pytest.mark.req("C12")
def test_logs_are_followed_over_a_requeue_to_the_runs_end(lab: SlurmLab, root: Path) -> None:
    run = make(root, "one")
    snapshot(run)
    job = launch_shell_trainer(lab, run, TALKER, 12)
    with subprocess.Popen(
        [*COMMAND, "logs", "one", "--follow"],
        cwd=root.parent,
        env=lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        try:
            assert wait_until(lambda: "started" in told(run), 20)
            lab.run("scancel", "--signal=USR2", job)
            assert wait_until(run.finished.exists, 40), told(run)
            text, _ = follower.communicate(timeout=30)
        finally:
            follower.kill()
    assert follower.returncode == 0
    first, second = text.index(f"{job}.r0.0.log"), text.index(f"{job}.r1.0.log")
    assert first < text.index("-- requeued") < second
    assert "step 12 of 0" in text[second:] and "of 1" not in text
    assert text.rstrip().endswith("run one: finished")
    # Once more, of what has ended: the newest start's, without waiting.
    text = trierarch(lab, root, "logs", "one", "--rank", "3", "-n", "1")
    assert text.splitlines()[1:] == [f"== runs/one/logs/{job}.r1.3.log", "step 12 of 3"]


@pytest.mark.req("C12")
def test_logs_of_a_failed_run_begin_with_the_reason(lab: SlurmLab, root: Path) -> None:
    run = make(root, "one")
    snapshot(run)
    failing = '#!/bin/bash\necho "I am $SLURM_PROCID"; [ "$SLURM_PROCID" = 2 ] || sleep 20\nexit 78\n'
    lab.wait_for_state(launch_shell_trainer(lab, run, failing), {"FAILED"}, 30)
    text = trierarch(lab, root, "logs", "one")
    assert text.startswith("run one: failed: Exit code 78") and "I am " in text
    assert "starting" in trierarch(lab, root, "logs", "one", "--batch")


@pytest.mark.req("C12", "C13")
def test_a_cancelled_run_saves_is_not_requeued_and_is_resubmitted(
    lab: SlurmLab, root: Path, toy_tokens: Path
) -> None:
    toy = [*MODEL, *LOOP, *REST, *QUIET, f"data.prefix={toy_tokens}", "loop.steps=200", "run.name=one"]
    where = ["cluster=lab", "job.nodes=1", "job.ranks_per_node=1", "job.time_limit=00:05:00"]
    trierarch(lab, root, "submit", *toy, *where)
    run = RunFolder(root / "one")
    assert "run one has job" in trierarch(lab, root, "resubmit", "one", code=78)
    assert wait_until(lambda: (last_json_line(run.metrics) or {}).get("step", 0) >= 5, 40), told(run)

    job = str(seen(run).job_id)
    assert f"run one: job {job} is asked to save and to end" in trierarch(lab, root, "cancel", "one")
    assert wait_until(lambda: not seen(run).state.is_live, 30), (seen(run), told(run))
    assert seen(run).state is RunState.stopped and seen(run).reason == "cancelled"
    saved = run.published_steps()[-1]
    assert 5 <= saved < 200 and "requeued" not in told(run) and "stopped" in told(run)
    assert wait_until(lambda: lab.run("squeue", "--noheader") == "", 20)
    assert "has no live job" in trierarch(lab, root, "cancel", "one")

    (run.code / "mark").touch()
    trierarch(lab, root, "resubmit", "one", "job.ranks_per_node=2")
    assert seen(run).job_id != job and (run.code / "mark").exists()
    assert wait_until(run.finished.exists, 60), (seen(run), told(run))
    resumed = [event for event in run.read_events() if event["event"] == Event.RESUMED]
    assert [event["step"] for event in resumed] == [saved]
    steps = [line["step"] for line in read_json_lines(run.metrics) if "loss" in line]
    assert steps == list(range(1, 201))
    assert "run one is finished" in trierarch(lab, root, "resubmit", "one", code=78)


@pytest.mark.req("C12")
def test_a_cancelled_sweep_stays_cancelled_and_one_task_of_it_is_resubmitted(
    lab: SlurmLab, root: Path, toy_tokens: Path
) -> None:
    toy = [*MODEL, *LOOP, *REST, *QUIET, f"data.prefix={toy_tokens}", "loop.steps=20000,30,31"]
    where = ["cluster=lab", "job.nodes=1", "job.ranks_per_node=1", "job.time_limit=00:05:00"]
    trierarch(lab, root, "sweep", "--name", "s", "--parallel", "1", *toy, *where)
    by_steps = {one.steps: one.run for one in status(root / "s")}
    long, short = by_steps[20_000], by_steps[30]
    assert wait_until(lambda: (last_json_line(long.metrics) or {}).get("step", 0) >= 5, 40), told(long)

    text = trierarch(lab, root, "cancel", "s", "--yes")
    assert text.count("is asked to save and to end") == 1 and text.count("waited in the queue") == 2
    assert wait_until(lambda: {one.state for one in status(root / "s")} == {"stopped"}, 30), status(
        root / "s"
    )
    assert long.published_steps() and not short.published_steps()
    assert wait_until(lambda: lab.run("squeue", "--noheader") == "", 20)

    trierarch(lab, root, "resubmit", f"s/{short.name}", "job.max_restarts=0")
    assert wait_until(short.finished.exists, 40), (status(root / "s"), told(short))
    assert sorted(one.state for one in status(root / "s")) == ["finished", "stopped", "stopped"]
    assert "requeued" not in told(long) and told(long).count("submitted") == 1


def test_watch_shows_the_states_again_and_ends_with_ctrl_c(lab: SlurmLab, root: Path) -> None:
    run = make(root, "one")
    job = submit(lab, run, "sleep 100")
    with subprocess.Popen(
        [*COMMAND, "status", "--watch", "--every", "0.2"],
        cwd=root.parent,
        env=lab.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as watcher:
        assert watcher.stdout is not None
        lines = iter(watcher.stdout.readline, "")
        assert any("running" in line for line in lines)
        lab.run("scancel", job)
        assert any("stopped" in line for line in lines)
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=20) == 0
