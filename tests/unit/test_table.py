"""How states of runs are shown."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.run_folder import RunFolder
from slurm.runs.status import RunState, RunStatus
from tools.table import as_json, duration, ordered, render, table


def one(
    name: str, state: RunState = RunState.running, age_s: float | None = 5.0, **more: object
) -> RunStatus:
    return RunStatus(RunFolder(Path("runs") / name), state, age_s=age_s, **more)  # type: ignore[arg-type]


def test_what_lives_stands_at_the_end_and_does_not_jump_about() -> None:
    shown = ordered(
        [
            one("b", age_s=90),
            one("a", age_s=3),
            one("new", RunState.new, None),
            one("older", RunState.finished, 5000),
            one("newer", RunState.failed, 100),
        ]
    )
    assert [status.run.name for status in shown] == ["new", "older", "newer", "a", "b"]


def test_a_sweep_is_one_line_unless_its_tasks_are_asked_for() -> None:
    states = [RunState.running, RunState.finished, RunState.finished, RunState.queued, RunState.failed]
    tasks = [
        one(f"lr={index}", state, job_id=f"77_{index}", sweep="runs/lr") for index, state in enumerate(states)
    ]
    text = render([one("single", job_id="5"), *tasks], tasks=False)
    lines = text.splitlines()
    assert len(lines) == 3
    (line,) = [line for line in lines if line.startswith("lr/")]
    assert line.split()[:3] == ["lr/", "running", "77"]
    assert line.endswith("sweep of 5: 1 queued, 1 running, 2 finished, 1 failed")
    each = render(tasks)
    assert len(each.splitlines()) == 6 and "lr/lr=4" in each


def test_a_long_reason_is_folded_beside_or_below_its_run() -> None:
    reason = "node n4 was lost " * 12
    shown = [one("one", RunState.lost, reason=reason)]
    wide = render(shown, width=100)
    assert len(wide.splitlines()) > 2 and max(map(len, wide.splitlines())) <= 100
    narrow = render(shown, width=50).splitlines()
    assert (
        "reason" not in narrow[0]
        and narrow[1].startswith("one")
        and narrow[2].startswith("    node n4")
        and max(map(len, narrow)) <= 50
    )
    assert len(render(shown).splitlines()) == 2  # for a pipe: one line a run


@pytest.mark.parametrize("reason", ["two\nlines\there", "\x1b[2Jgone \x1b]0;title\x07"])
def test_a_reason_cannot_break_the_table(reason: str) -> None:
    text = render([one("one", RunState.failed, reason=reason)])
    assert len(text.splitlines()) == 2 and "\x1b" not in text and "\x07" not in text


@given(st.lists(st.tuples(*[st.text("ab c", max_size=30)] * 3), min_size=1, max_size=5), st.integers(20, 120))
def test_columns_stay_aligned(rows: list[tuple[str, str, str]], width: int) -> None:
    text = table(("x", "y", "z"), rows, frozenset({"y"}), None)
    assert len(text.splitlines()) == len(rows) + 1
    start = max(len(row[0]) for row in (*rows, "x")) + 2
    assert all(
        line[:start].rstrip() == row[0].rstrip()
        for line, row in zip(text.splitlines()[1:], rows, strict=True)
    )
    # Nothing is lost by folding but, where it would stand alone, the head of what is folded.
    whole, folded = (table(("x", "y", "z"), rows, frozenset(), size).split() for size in (None, width))
    assert folded in (whole, [word for at, word in enumerate(whole) if (at, word) != (2, "z")])


def test_objects_for_scripts_say_what_is_not_known() -> None:
    (plain,) = json.loads(as_json([one("one", RunState.lost, job_id="7", bad_nodes=("n4",))]))
    assert (plain["run"], plain["state"], plain["job"], plain["loss"]) == ("one", "lost", "7", None)
    assert plain["path"] == "runs/one" and plain["bad_nodes"] == ["n4"]
    assert as_json([]) == "[]\n"


def test_times_are_written_in_the_unit_that_suits() -> None:
    assert [duration(s) for s in (5, 600, 36_000, 500_000)] == ["5 s", "10 min", "10 h", "6 d"]
