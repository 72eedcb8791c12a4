"""The stop request owns its signals, and says whom it took them from."""

import os
import signal
from collections.abc import Iterator

import pytest

from train.resilience.stop import StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_any_of_the_signals_is_a_request(number: signal.Signals) -> None:
    request = StopRequest("SIGUSR2")
    assert request.received is None
    os.kill(os.getpid(), number)
    assert request.received == number.name
    assert request.replaced == []


def test_a_handler_that_was_there_is_reported() -> None:
    """Two owners of one signal: the other one, a library's for example, would no longer hear it."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    assert StopRequest("SIGUSR2").replaced == ["SIGUSR2"]
