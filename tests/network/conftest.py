"""Tests on nodes that are network namespaces of this host."""

import pytest
from harness import netns


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    """Skip all where there are none."""
    if reason := netns.why_not():
        pytest.skip(reason)
