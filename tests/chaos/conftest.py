"""Tests in this folder break things at random for minutes; `make chaos` runs them."""

from pathlib import Path

import pytest
from harness.lab_runs import runs, undisturbed
from harness.slurm_lab import clean_lab, lab, slurm_packages

__all__ = ["clean_lab", "lab", "runs", "slurm_packages", "undisturbed"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.chaos)
