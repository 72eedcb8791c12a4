"""Tests in this folder run on the lab."""

from pathlib import Path

import pytest
from harness.lab_runs import runs, undisturbed
from harness.slurm_lab import clean_lab, lab, slurm_packages

__all__ = ["clean_lab", "lab", "runs", "slurm_packages", "undisturbed"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in filter(_is_here, items):
        item.add_marker(pytest.mark.slurm)


def _is_here(item: pytest.Item) -> bool:
    return item.path.is_relative_to(Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def here_all_tests_need_slurm(slurm_packages: None) -> None:
    pass
