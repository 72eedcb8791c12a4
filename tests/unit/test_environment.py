"""One place for dependencies: pyproject.toml; the pins and the conda environment follow from it."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))
    }


@pytest.mark.req("C1", "C2", "D1")
def test_every_dependency_is_pinned_to_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[<>=;\s]", spec)[0]).lower() for spec in wanted}
    assert names <= pins().keys()
    assert {"hydra-core", "mpi4py", "submitit", "tensorboard", "torch"} <= names
    assert pins()["torch"] == "2.13.0"
    for name in names:
        installed = metadata.version(name).split("+")[0]
        assert installed == pins()[name], f"{name} is {installed} here, constraints.txt says {pins()[name]}"


@pytest.mark.req("C1", "D1")
def test_conda_installs_this_checkout_with_the_same_constraints() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    makefile = (ROOT / "Makefile").read_text()
    assert "--constraint constraints.txt --editable '.[dev]'" in makefile
    assert pip == ["--constraint constraints.txt", "--editable .[dev]"]
    packages = {
        re.split(r"[<>=]", entry)[0] for entry in environment["dependencies"] if isinstance(entry, str)
    }
    assert packages == {"python", "pip", "make", "git"}, "what Python needs comes from pyproject.toml"


@pytest.mark.req("C1")
def test_the_top_level_is_as_promised() -> None:
    for name in ("slurm", "train", "tools", "configs", "tests"):
        assert (ROOT / name).is_dir()
    for name in ("Makefile", "environment.yml"):
        assert (ROOT / name).is_file()
