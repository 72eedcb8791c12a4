"""Which of the steps on the nodes' disks is published, and who copies what."""

from pathlib import Path

from contract.run_folder import RunFolder
from train.checkpoint.fast import FastTier, Note
from train.checkpoint.recover import Found, survey


def note(step: int, rank: int, of: int, nbytes: int = 10, began: float = 100.0) -> Note:
    manifest = {"step": step, "world_size": of, "model": {}, "data": {}}
    return Note(rank, began, {f"__{rank}_0.distcp": nbytes}, {}, manifest)


def test_steps_are_put_together_from_all_nodes() -> None:
    found: list[Found] = [
        {"step_3.a": [note(3, 0, 2)], "step_4.b": [note(4, 0, 2)]},
        {"step_3.a": [note(3, 1, 2)], "step_4.c": [note(4, 1, 2)]},
    ]
    steps = survey(found, 2, 50.0)
    assert [(one.name, one.missing) for one in steps if one.note.step == 3] == [("step_3.a", [])]
    assert {one.name: one.missing for one in steps if one.note.step == 4} == {
        "step_4.b": [1],
        "step_4.c": [0],
    }
    assert steps[-1].name == "step_3.a"


def test_what_is_older_by_step_or_by_time_is_of_no_use() -> None:
    found = [{f"step_{step}.a": [note(step, 0, 1, began=100.0 + step)] for step in (3, 4, 5)}]

    def useful(newest_step: int, newest_began: float) -> list[int]:
        return [one.note.step for one in survey(found, newest_step, newest_began) if one.problem() is None]

    assert useful(3, 0.0) == [5, 4]
    assert useful(0, 104.0) == [5]
    assert useful(-1, 0.0) == [5, 4, 3]
    # What is not further than what is published is nothing to tell of; what was left behind is.
    assert [one.note.step for one in survey(found, 3, 110.0)] == [5, 4]
    assert survey(found, 3, 110.0)[0].problem() == (
        "the run has gone on from an older one: it began to save step 3 5 s later"
    )


def test_a_note_gives_the_manifest_the_time_at_which_the_step_began() -> None:
    """Also one whose manifest was written when there was no such field."""
    assert note(3, 0, 1, began=7.5).base().began == 7.5


def test_files_are_shared_out_among_the_ranks_that_reach_them() -> None:
    sizes = [50, 10, 10, 30, 20]
    notes = [note(1, rank, 5, nbytes) for rank, nbytes in enumerate(sizes)]
    # Ranks 0 and 1 are on one node, rank 2 on another.
    found = [{"step_1.a": notes[:4]}, {"step_1.a": notes[:4]}, {"step_1.a": notes[4:]}]
    (kept,) = survey(found, 0, 0.0)
    shares = kept.deal()
    assert sorted(then for share in shares.values() for then in share) == [0, 1, 2, 3, 4]
    assert shares[2] == [4]
    assert [sum(sizes[then] for then in shares[now]) for now in (0, 1)] == [50, 50]


def test_a_start_removes_only_what_it_knows(tmp_path: Path) -> None:
    """One that stood still may wake up after the next has begun."""
    for name in ("step_1.a", "step_2.b"):
        (tmp_path / name).mkdir()
    FastTier(tmp_path, RunFolder(tmp_path / "run"), {"step_1.a", "step_0.gone"})._remove_all()
    assert [path.name for path in tmp_path.iterdir()] == ["step_2.b"]
