"""The pulse of a rank, and the order of the time limits that depend on it."""

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.config import WATCH_MARGIN_S, ResilienceConfig, TrainConfig
from train.resilience import pulse
from train.resilience.process import fork
from train.resilience.pulse import Phase, Pulse


def test_what_a_forked_rank_beats_its_parent_reads() -> None:
    memory = pulse.shared_memory(3)
    ranks = [Pulse(memory, index) for index in range(3)]
    for rank in ranks:
        rank.limits = pulse.limits(ResilienceConfig(step_timeout_s=77))
        rank.beat(Phase.START, 0)

    def run() -> int:
        ranks[1].beat(Phase.STEP, 2**40)
        pulse.adopt(ranks[2])
        pulse.beat(Phase.STEP, 5)
        pulse.beat(Phase.SAVE)
        return 0

    assert os.waitpid(fork(run), 0)[1] == 0
    first, second, third = (rank.last() for rank in ranks)
    assert (first.phase, first.step) == (Phase.START, 0)
    assert (second.phase, second.step, second.limit_s) == (Phase.STEP, 2**40, 77)
    assert (third.phase, third.step) == (Phase.SAVE, 5), "a phase of the same step"
    assert first.time_s <= second.time_s <= third.time_s


def test_a_forked_process_dies_of_its_own_code_and_waits_for_signals() -> None:
    """A signal that comes before the child has a handler is kept for it."""

    def run() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        received: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return 42 if received else 1

    assert os.waitstatus_to_exitcode(os.waitpid(fork(run), 0)[1]) == 42

    def fail() -> int:
        raise RuntimeError("a traceback, not a second life of the parent")

    assert os.waitstatus_to_exitcode(os.waitpid(fork(fail), 0)[1]) == 1


times = st.floats(min_value=1e-3, max_value=1e6)


@pytest.mark.req("C12")
@given(start=times, step=times, collective=times, checkpoint=times)
def test_a_hang_is_seen_before_those_who_wait_give_up(
    start: float, step: float, collective: float, checkpoint: float
) -> None:
    """PyTorch's own limits end all ranks and name none; the watch knows which one was silent."""
    config = TrainConfig()
    config.model.vocab_size = 64
    config.resilience = ResilienceConfig(
        start_timeout_s=start,
        step_timeout_s=step,
        collective_timeout_s=collective,
        checkpoint_timeout_s=checkpoint,
    )
    try:
        config.validate()
    except ConfigError as error:
        assert "resilience." in str(error)
        return
    limits = pulse.limits(config.resilience)
    assert (
        max(limits[phase] for phase in (Phase.START, Phase.FIRST_STEP, Phase.STEP, Phase.EVALUATE))
        <= collective
    )
    assert limits[Phase.START] >= start + WATCH_MARGIN_S, "who waits for a missing rank names it first"
    assert limits[Phase.FIRST_STEP] >= start


@pytest.mark.parametrize("key", ["start_timeout_s", "step_timeout_s"])
def test_limits_in_the_wrong_order_are_refused(key: str) -> None:
    config = TrainConfig()
    config.resilience = ResilienceConfig(**{key: 590.0})
    with pytest.raises(
        ConfigError, match=f"resilience.{key}=590.0 leaves less than 30 s until resilience.collective"
    ):
        config.validate()
