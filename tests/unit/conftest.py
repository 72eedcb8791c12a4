"""Fixtures that several modules of unit tests share."""

from harness.supervised import stop_request, world

__all__ = ["stop_request", "world"]
