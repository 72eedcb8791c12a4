"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.checkpoint.retain import Retention, Whole
from train.config import load_config

GB = 1_000_000_000


def steps(*numbers: int, unverified: tuple[int, ...] = ()) -> list[Whole]:
    """Steps of 1 GB each."""
    return [Whole(step, GB, step not in unverified) for step in numbers]


@pytest.mark.req("C9")
@pytest.mark.parametrize(
    ("retention", "unverified", "removed"),
    [
        (Retention(2), (), [10, 20, 30, 40]),
        (Retention(0), (), []),
        (Retention(9), (), []),
        (Retention(1, keep_every_steps=20), (), [10, 30, 50]),
        (Retention(1, keep_best=2), (), [10, 20, 50]),
        (Retention(1, keep_every_steps=30, keep_best=1), (), [10, 20, 40, 50]),
        (Retention(2), (60,), [10, 20, 30]),
        (Retention(2), (50, 20), [10, 20, 30]),
        (Retention(2), (20, 30, 40, 50, 60), []),
        (Retention(2), (10, 20, 30, 40, 50, 60), []),
        (Retention(1, keep_every_steps=10), (30,), [30]),
        (Retention(0, disk_budget_gb=2.5), (), [10, 20, 30, 40]),
        (Retention(3, disk_budget_gb=2), (), [10, 20, 30, 40]),
        (Retention(1, keep_best=2, disk_budget_gb=2), (), [10, 20, 40, 50]),
        (Retention(1, disk_budget_gb=0.1), (), [10, 20, 30, 40, 50]),
        (Retention(0, disk_budget_gb=0.1), (60,), [10, 20, 30, 40, 60]),
    ],
)
def test_what_goes(retention: Retention, unverified: tuple[int, ...], removed: list[int]) -> None:
    losses = {20: 3.0, 30: 2.0, 40: 2.5, 60: 4.0}
    assert retention.surplus(steps(10, 20, 30, 40, 50, 60, unverified=unverified), losses) == removed


def test_what_lies_about_counts_against_the_budget() -> None:
    retention = Retention(0, disk_budget_gb=3)
    assert retention.surplus(steps(1, 2, 3), {}) == []
    assert retention.surplus(steps(1, 2, 3), {}, others_bytes=GB) == [1]
    assert retention.exceeded(steps(1, 2, 3), [1], others_bytes=GB) is None
    assert retention.exceeded(steps(1, 2, 3), [1, 2], others_bytes=5 * GB) == pytest.approx(3)


@pytest.mark.req("C9", "A22")
@given(
    found=st.dictionaries(st.integers(0, 60), st.tuples(st.booleans(), st.integers(0, 3 * GB)), max_size=12),
    losses=st.dictionaries(st.integers(0, 60), st.floats(0, 10), max_size=12),
    retention=st.builds(
        Retention,
        st.integers(0, 4),
        st.sampled_from([0, 5, 20]),
        st.integers(0, 3),
        st.none() | st.floats(0.1, 9),
    ),
    others_bytes=st.integers(0, 3 * GB),
)
def test_the_newest_verified_step_always_stays(
    found: dict[int, tuple[bool, int]], losses: dict[int, float], retention: Retention, others_bytes: int
) -> None:
    whole = [Whole(step, size, verified) for step, (verified, size) in found.items()]
    removed = retention.surplus(whole, losses, others_bytes)
    verified = sorted(one.step for one in whole if one.verified)
    left = [one for one in whole if one.step not in removed]
    if not verified:
        assert not removed
        return
    assert verified[-1] not in removed
    if retention.disk_budget_gb is None:
        wanted = verified[-retention.keep_last :] if retention.keep_last else [one.step for one in whole]
        assert not set(removed) & set(wanted)
    elif sum(one.bytes for one in left) + others_bytes > retention.disk_budget_gb * GB:
        assert [one.step for one in left] == [verified[-1]]
    assert retention.surplus(left, losses, others_bytes) == [], "a second look removes nothing more"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("keep_best=1 keep_last=0 every_steps=5", "checkpoint.keep_best=1 changes nothing"),
        ("keep_every_steps=10", "needs checkpoints at known steps: set checkpoint.every_steps"),
        ("keep_every_steps=10 every_steps=4", "is no multiple of checkpoint.every_steps=4"),
        ("disk_budget_gb=0", "must be above 0"),
        ("keep_best=-1", "must be at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config([f"checkpoint.{one}" for one in settings.split()])


def test_the_best_need_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best=1 needs evaluations"):
        load_config(["checkpoint.keep_best=1", "checkpoint.every_steps=5", "loop.eval_every_steps=0"])
    load_config(["checkpoint.keep_best=1", "checkpoint.every_steps=5", "checkpoint.disk_budget_gb=2"])
