"""Measuring on a machine where others compute too."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIES = 3


def measured_again(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test that judges a real measurement measure up to three times, each in a folder of its own.

    A burst of foreign load makes any link slow for a moment. A fault of the code fails each time.
    """

    @functools.wraps(test)
    def patient(tmp_path: Path, **others: Any) -> None:
        for number in range(1, TRIES + 1):
            folder = tmp_path / str(number)
            folder.mkdir()
            try:
                test(tmp_path=folder, **others)
                return
            except AssertionError:
                if number == TRIES:
                    raise

    return patient
