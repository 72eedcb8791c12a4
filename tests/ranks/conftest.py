"""The `ranks` fixture: live gloo ranks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.pool import RankPool, Ranks


@pytest.fixture(scope="session")
def rank_pool(session_seed: int) -> Iterator["RankPool"]:
    """The pool behind `ranks`; its processes end with the session."""
    from harness.pool import RankPool  # imports torch: only for the tests that need it

    pool = RankPool(session_seed)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(rank_pool: "RankPool") -> "Ranks":
    """`ranks(4, function, *args, timeout_s=60, **kwargs)`: the results of 4 ranks; see RankPool.run."""
    return rank_pool.run
