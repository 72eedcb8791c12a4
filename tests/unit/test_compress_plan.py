"""Steps are stored so that none needs one that goes, and no chain is too long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.checkpoint.compress.plan import Job, Step, Wish, chain, jobs, removable, stranded
from train.config import load_config


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[int, Step], set[int], Wish]:
    numbers = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=12)))
    wish = Wish(
        draw(st.booleans()), draw(st.booleans()), draw(st.integers(1, 4)), draw(st.sampled_from([0, 5, 10]))
    )
    steps: dict[int, Step] = {}
    for number in numbers:
        parents = {step: one.parent for step, one in steps.items()}
        fitting = [one for one in steps if chain(one, parents) < wish.longest_chain]
        parent = draw(st.sampled_from([None, *fitting]))
        steps[number] = Step(parent is not None or draw(st.booleans()), parent)
    return steps, draw(st.sets(st.sampled_from(numbers), max_size=len(numbers) - 1)), wish


@given(situations())
def test_what_stays_needs_nothing_that_goes_and_chains_are_bounded(
    given_: tuple[dict[int, Step], set[int], Wish],
) -> None:
    steps, removed, wish = given_
    done = jobs(steps, removed, wish)
    assert [one.step for one in done] == sorted({one.step for one in done} - removed)
    parents = {step: one.parent for step, one in steps.items()} | {one.step: one.parent for one in done}
    kept = set(steps) - removed
    for step in kept:
        assert parents[step] is None or parents[step] in kept
        assert chain(step, parents) <= wish.longest_chain
    for step in kept & {step for step, one in steps.items() if not one.compressed}:
        assert (step in {one.step for one in done}) == wish.compress
    for one in done:
        if (
            not steps[one.step].compressed
            and wish.alone_every_steps
            and one.step % wish.alone_every_steps == 0
        ):
            assert one.parent is None


def test_each_step_is_the_difference_to_the_one_before_up_to_the_longest_chain() -> None:
    plain = Step(compressed=False)
    wish = Wish(True, True, longest_chain=2)
    assert jobs(dict.fromkeys(range(10, 60, 10), plain), set(), wish) == [
        Job(10, None),
        Job(20, 10),
        Job(30, 20),
        Job(40, None),
        Job(50, 40),
    ]
    assert jobs({10: Step(True), 20: Step(True, 10), 30: plain}, {10}, wish) == [Job(20, None), Job(30, 20)]
    assert jobs({10: Step(True), 20: Step(True, 10)}, {10}, Wish(False)) == [Job(20, None)]


@given(situations())
def test_what_can_go_is_all_that_no_kept_step_needs(
    given_: tuple[dict[int, Step], set[int], Wish],
) -> None:
    steps, surplus, _ = given_
    gone = removable(steps, surplus | {1000})
    left = set(steps) - set(gone)
    assert all(steps[step].parent in {None, *left} for step in left)
    assert set(gone) <= surplus
    for step in left & surplus:  # each is there for a reason
        children, reached = {step}, {step}
        while children:
            children = {one for one in steps if steps[one].parent in children} - reached
            reached |= children
        assert reached - surplus


@given(situations())
def test_what_is_given_up_leaves_the_newest_step_and_nothing_that_needs_what_is_gone(
    given_: tuple[dict[int, Step], set[int], Wish],
) -> None:
    steps, surplus, _ = given_
    gone = set(stranded(steps, surplus))
    left = set(steps) - gone
    assert max(steps) in left
    assert all(steps[step].parent in {None, *left} for step in left)
    assert surplus - gone <= {max(steps), *_needed(max(steps), steps)}


def _needed(step: int, steps: dict[int, Step]) -> set[int]:
    parent = steps[step].parent
    return set() if parent is None else {parent, *_needed(parent, steps)}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("compress=delta delta_chain=0", "delta_chain=0: must be between 1 and 32"),
        ("compress=delta delta_chain=33", "delta_chain=33: must be between 1 and 32"),
        (
            "lossy=moments",
            "lossy=moments only gains where steps are compressed: set checkpoint.compress=each",
        ),
        ("lossy=all compress=each lossy_error=0", "lossy_error=0.0: must be above 0.00390625 and at most 1"),
        ("lossy=all compress=each lossy_error=nan", "lossy_error=nan: must be above"),
        (
            "lossy=all compress=each exact_resume=true",
            "exact_resume=true refuses what checkpoint.lossy=all saves",
        ),
        ("delta_chain=2", "delta_chain=2 changes nothing without checkpoint.compress=delta"),
        ("lossy_error=0.2", "lossy_error=0.2 changes nothing without checkpoint.lossy"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_config([f"checkpoint.{one}" for one in settings.split()])
