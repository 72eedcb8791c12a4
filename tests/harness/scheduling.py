"""Which tests one of several test processes (pytest -n) takes all of."""

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

TOGETHER = ("tests/slurm/", "tests/ranks/test_reshard.py", "tests/network/")
"""Beginnings of the names of tests that share what is expensive to make: a lab, the checkpoints of many layouts.

Those of the lab and of real networks also wait more than they compute, while the other processes compute.
"""


class TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out the tests of a place of `TOGETHER` as one piece, and first, all others one by one.

    xdist's own groups do nothing under pytest 9.2, which names tests in another way.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)
