"""A run folder that is not the same folder on every node."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness.nodes import forked, join, see_an_empty
from harness.toy import StopAfter, toy_overrides

from contract.errors import UserError
from contract.run_folder import RunFolder
from train import launch
from train.bootstrap import World
from train.config import load_config
from train.run import run_rank

pytestmark = pytest.mark.slow


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount file systems")
@pytest.mark.req("A22", "D3")
@pytest.mark.parametrize("hidden", ["run", "run/checkpoints"])
def test_a_run_folder_on_disks_of_the_nodes_is_refused(toy_tokens: Path, tmp_path: Path, hidden: str) -> None:
    """Before anything is written to it that would count."""
    RunFolder(tmp_path / "run").create()
    overrides = toy_overrides(
        toy_tokens, tmp_path, "run", "loop.steps=1", "resilience.collective_timeout_s=60"
    )
    overrides += ["resilience.step_timeout_s=20", "resilience.start_timeout_s=20"]

    def train(rank: int) -> None:
        if rank == 1:
            see_an_empty(tmp_path / hidden)
        join(rank, 2, tmp_path / "store")
        world = World(rank=rank, size=2, node_rank=rank, nodes=2, launcher="test")
        told = None
        with mock.patch.object(launch, "SHARED_STORAGE_WAIT_S", 0.3):
            try:
                run_rank(load_config(overrides), StopAfter(None), world, torch.device("cpu"))
            except UserError as error:
                told = [type(error).__name__, str(error)]
        (tmp_path / f"told{rank}").write_text(json.dumps(told))
        os._exit(0)

    for child in forked(2, train):
        assert os.waitpid(child, 0)[1] == 0
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1)]
    assert told[1][0] == "UserError" and told[0][0] == "ReportedError"
    assert told[1][1].startswith("rank 1 (rank 1 on ")
    folder = tmp_path / hidden
    assert (
        f"{folder} is not the folder that rank 0 writes to: put run.root on storage that all nodes"
        in told[1][1]
    )
    assert RunFolder(tmp_path / "run").published_steps() == []
