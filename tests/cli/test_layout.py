"""`trierarch layout` and what the other commands say of a layout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.command import Trierarch
from harness.toy import MODEL

from contract.exit_codes import ExitCode
from train.config import load_config
from train.model.config import parameter_count

DEEPSEEK = [
    "layout",
    "model=deepseek_7b",
    "data.sequence_length=4096",
    "micro_batch_size=2",
    "gradient_accumulation_steps=1",
    "parallel.zero=1",
]


@pytest.mark.req("D8", "A5", "C5")
def test_deepseek_on_four_nodes_of_eight(trierarch: Trierarch) -> None:
    shown = trierarch(*DEEPSEEK, "tensor_parallel_size=8", "--nodes", "4")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == "deepseek_7b, 6.91 G parameters, on 4 nodes of 8: dp_shard 4 x tp 8, ZeRO 1"
    assert "8 samples of 4,096 tokens = 4 data-parallel x 1 micro-batch x 2 samples" in lines[1]
    for node in range(4):
        (head,) = [line for line in lines if f"node {node}," in line]
        assert re.findall(r"\d+", head)[1:] == [str(rank) for rank in range(8 * node, 8 * node + 8)]
    assert re.search(r"dp_shard +│ 4 +│ 4 nodes +│ all-gather weights", shown.stdout)
    assert re.search(r"tp +│ 8 +│ one node +│ all-gather activations", shown.stdout)
    assert "note:" not in shown.stdout

    facts = json.loads(trierarch(*DEEPSEEK, "tensor_parallel_size=8", "--nodes", "4", "--json").stdout)
    total = parameter_count(load_config(["model=deepseek_7b"]).model)
    norms = 61 * 4096
    assert [place["rank"] for place in facts["places"]] == list(range(32))
    # Each of the eight has an eighth of the matrices, and the norms.
    assert {place["parameters"] for place in facts["places"]} == {(total - norms) // 8 + norms}
    assert facts["places"][9]["coordinates"] == {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1}
    assert facts["places"][9]["node"] == 1


@pytest.mark.req("A5", "C5")
def test_one_rank_of_a_large_layout(trierarch: Trierarch) -> None:
    large = ["layout", "model=gpt3_175b", "parallel.tp=8", "parallel.pp=8", "gradient_accumulation_steps=16"]
    shown = trierarch(*large, "parallel.zero=1", "--nodes", "512", "--rank", "4095")
    assert "rank 4095 is on node 511, at pp 7, dp_replicate 0, dp_shard 63, cp 0, tp 7" in shown.stdout
    assert "511, 1023, ..., 4095" in shown.stdout
    assert "head" in shown.stdout and "embedding" not in shown.stdout
    everything = trierarch(*large, "parallel.zero=1", "--nodes", "512").stdout
    assert "508 more nodes" in everything and "node 511," in everything and "node 100," not in everything
    wrong = trierarch(*large, "--nodes", "512", "--rank", "4096")
    assert (wrong.returncode, wrong.stderr) == (
        ExitCode.CONFIG,
        "trierarch: --rank 4096: the ranks are 0 to 4095\n",
    )


@pytest.mark.req("C5")
def test_stages_without_layers_are_told_apart(trierarch: Trierarch) -> None:
    shown = trierarch(
        "layout", "model=llama_1m", "pipeline_parallel_size=4", "parallel.split=[0,1,4,0]",
        "gradient_accumulation_steps=8", "model.vocab_size=320", "--ranks-per-node", "4",
    )  # fmt: skip
    rows = re.findall(r"│ rank (\d) │ (\w[\w-]*)", shown.stdout)
    assert rows == [("0", "embedding"), ("1", "0"), ("2", "1-4"), ("3", "none")], shown.stdout
    assert "head" in shown.stdout.split("rank 3 │")[1]


@pytest.mark.req("B1", "C5")
def test_the_cluster_says_how_many_ranks_there_are(trierarch: Trierarch) -> None:
    where = ["cluster=leonardo_booster", "job.nodes=2"]
    shown = trierarch("layout", *where, "tensor_parallel_size=8", "model.heads=8", "micro_batch_size=2")
    assert "on 2 nodes of 4: tp 8" in shown.stdout
    assert "note:  parallel.tp=8 spans nodes of 4 ranks" in shown.stdout
    assert "model.vocab_size is null and there is no data" in " ".join(shown.stdout.split())
    refused = trierarch("layout", *where, "tensor_parallel_size=3")
    assert refused.returncode == ExitCode.CONFIG
    assert "which does not divide 8 ranks" in refused.stderr and "possible: parallel.tp=4" in refused.stderr


@pytest.mark.req("A5")
def test_submit_says_what_is_unfortunate(trierarch: Trierarch) -> None:
    told = trierarch("submit", "--dry-run", "cluster=local", "job.ranks_per_node=1", "parallel.zero=3")
    assert told.returncode == 0, told.stderr
    assert "note:  parallel.zero=3 shares nothing" in told.stderr


@pytest.mark.req("C5")
def test_a_submission_to_gpus_refuses_what_computes_on_a_cpu_alone(trierarch: Trierarch) -> None:
    ring = ["cluster=a100_ib", "parallel.cp=2", "parallel.context=ring", "precision=fp32"]
    refused = trierarch("submit", "--dry-run", *ring)
    assert refused.returncode == ExitCode.CONFIG
    assert "does not compute in fp32 on a GPU" in refused.stderr


@pytest.mark.req("C6")
def test_a_layout_says_what_is_where(trierarch: Trierarch) -> None:
    disks = ["offload.optimizer=nvme", "offload.parameters=nvme", "offload.nvme_path=[/local/nvme]"]
    case = [*DEEPSEEK[:-1], "parallel.zero=3", "tensor_parallel_size=4", *disks]
    shown = trierarch(*case, "--nodes", "4")
    assert "Memory on a GPU, of the rank that keeps most\nGB of rank 0 " in shown.stdout, shown.stderr
    state = re.search(r"optimizer state +- +- +([\d.]+)", shown.stdout)
    total = parameter_count(load_config(["model=deepseek_7b"]).model)
    assert state is not None and float(state[1]) == pytest.approx(12 * total / 32 / 1e9, rel=0.01)
    facts = json.loads(trierarch(*case, "--nodes", "4", "--rank", "5", "--json").stdout)["memory"]
    assert facts["rank"] == 5
    assert facts["optimizer"]["nvme_bytes"] == pytest.approx(12 * total / 32, rel=0.01)
    assert facts["parameters"]["device_bytes"] == 0


@pytest.mark.req("C6")
def test_a_budget_counts_before_anything_is_queued_or_started(trierarch: Trierarch, toy_tokens: Path) -> None:
    """Also where the vocabulary comes from the data."""
    case = [*MODEL, f"data.prefix={toy_tokens}", "offload.optimizer=cpu"]
    told = trierarch("submit", "--dry-run", "cluster=local", "job.ranks_per_node=1", *case)
    assert told.returncode == 0
    assert re.search(r"B of rank 0 +device +host\n", told.stderr), told.stderr
    for command in (
        ["submit", "--dry-run", "cluster=local", "job.ranks_per_node=1"],
        ["train", "--ranks", "1"],
    ):
        refused = trierarch(*command, *case, "offload.host_budget_gb=0.0001")
        assert refused.returncode == ExitCode.CONFIG
        assert re.fullmatch(
            r"trierarch: offload.host_budget_gb=0.0001: rank 0 needs [\d.]+ GB of memory of the host "
            r"\(optimizer state [\d.]+\): raise it, or move that to disks \(offload.optimizer=nvme\)\n",
            refused.stderr,
        ), refused.stderr


@pytest.mark.req("C1")
def test_it_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['trierarch', 'layout', 'model=llama_1m', 'gradient_accumulation_steps=1']\n"
        "from tools.cli import app\napp(standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'submitit'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)
