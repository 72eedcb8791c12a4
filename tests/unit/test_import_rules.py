"""Who may import whom, and what a login node must not wait for."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("contract", "configs", "slurm", "train", "tools")

# package -> ours that it may import. `tools/cli*.py` brings the parts together and is checked apart.
ALLOWED = {
    "contract": {"contract"},
    "configs": {"configs", "contract"},
    "slurm": {"slurm", "configs", "contract"},
    "train": {"train", "configs", "contract"},
    "tools": {"tools", "slurm", "configs", "contract"},
}


MEASURES_WITH = {
    "train",  # for train.roll_call
    "train.bootstrap",
    "train.comm.hierarchical",
    "train.resilience",  # for train.resilience.pulse
    "train.resilience.process",
    "train.resilience.pulse",
}


JUDGES_BY = {
    "train.comm.check",
    "train.config",
    "train.data.vocabulary",
    "train.model.config",
    "train.offload.check",
    "train.offload.config",
    "train.precision.check",
    "train.precision.config",
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.req("C1")
@pytest.mark.parametrize("package", OURS)
def test_packages_import_only_what_they_may(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        if package == "tools" and path.name.startswith("cli"):
            continue
        tops = {name.split(".")[0] for name in imports_of(path)}
        allowed = ALLOWED[package]
        if path.is_relative_to(ROOT / "tools/ckpt"):
            allowed = allowed | {"train"}
            # Its metadata are pickled objects of torch: they are made by torch's own classes.
            assert "torch" not in tops or path.name == "write_dcp.py", path
            # The format of checkpoints is all of the trainer that the tools for them know.
            names = {name for name in imports_of(path) if name.split(".")[0] == "train"}
            assert all(name.startswith("train.checkpoint.") for name in names), path
        if path.is_relative_to(ROOT / "tools/nccl/measure"):
            allowed = allowed | {"train"}
            # Ranks of the network test meet, watch each other and reduce as those of a training do.
            names = {name for name in imports_of(path) if name.split(".")[0] == "train"}
            assert names <= MEASURES_WITH, (path, names)
        elif path.is_relative_to(ROOT / "tools/doctor") or path.is_relative_to(ROOT / "tools/plan"):
            allowed = allowed | {"train"}
            # They judge a run before there is one: by the trainer's settings, and its arithmetic.
            names = {name for name in imports_of(path) if name.split(".")[0] == "train"}
            assert all(name in JUDGES_BY or name.startswith("train.layout.") for name in names), (path, names)
            assert "torch" not in tops, path
        elif path.is_relative_to(ROOT / "tools/nccl"):
            assert "torch" not in tops, path
        assert tops & set(OURS) <= allowed, path
        if package in ("contract", "configs", "slurm"):
            assert "torch" not in tops, path
        if package == "contract":
            assert tops - {"contract"} <= set(sys.stdlib_module_names), path


def test_the_model_knows_nothing_of_the_trainer() -> None:
    for path in (ROOT / "train/model").glob("*.py"):
        names = {name for name in imports_of(path) if name.split(".")[0] in OURS}
        assert all(name.startswith(("train.model", "contract")) for name in names), (path, names)
        assert not any(name.startswith("torch.distributed") for name in imports_of(path)), path


@pytest.mark.parametrize(
    "statement",
    [
        "import tools.cli, tools.cli_data, tools.cli_lab, tools.cli_runs, tools.table",
        "import train.config, train.checkpoint.manifest, train.data.prepare",
        "import slurm.settings, slurm.submit, slurm.runs.status, slurm.supervise.__main__, slurm.lab.cluster",
        "import slurm.runs.logs, slurm.runs.cancel, slurm.runs.resubmit",
        "import tools.cli_ckpt, tools.ckpt.open, tools.ckpt.validate, tools.ckpt.listing, tools.ckpt.summary",
        "import tools.cli_ckpt_convert, tools.ckpt.convert",
        "import tools.cli_ckpt_compress, tools.ckpt.compress, tools.ckpt.lossy",
        "import tools.cli_ckpt_diff, tools.ckpt.diff, tools.ckpt.diff_html, tools.ckpt.diff_text",
        "import tools.cli_plan, tools.plan.request, tools.plan.report, tools.plan.explain, tools.plan.scaling",
        "import tools.plan.timeline, tools.plan.picture, tools.plan.predict, tools.plan.rows",
        "import sys; sys.argv = ['trierarch', 'plan', 'model=llama_3m', 'model.vocab_size=320', 'cluster=jean_zay']\n"
        "from tools.cli import app\napp(standalone_mode=False)",
        "import tools.cli_nccl, tools.nccl.analyse, tools.nccl.report, tools.nccl.parsers.any_file",
        "import tools.cli_doctor, tools.doctor.run",
        "import sys; sys.argv = ['trierarch', 'doctor', 'model=deepseek_7b', 'cluster=juwels_booster', 'nodes=4']\n"
        "from tools.cli import app\napp(standalone_mode=False)",
        "import tools.cli_nvme, train.offload.nvme.measure, train.offload.nvme.store",
        "import sys; sys.argv = ['trierarch', 'train', '--cfg', 'job']\n"
        "from tools.cli import app\napp(standalone_mode=False)",
        "import sys; sys.argv = ['trierarch', 'submit', '--dry-run', 'cluster=slurm']\n"
        "from tools.cli import app\napp(standalone_mode=False)",
        "import sys; sys.argv = ['trierarch', 'layout', 'parallel.tp=2', 'gradient_accumulation_steps=1']\n"
        "from tools.cli import app\napp(standalone_mode=False)",
        "import sys; sys.argv = ['trierarch', 'status']\nfrom tools.cli import app\napp(standalone_mode=False)",
    ],
)
def test_a_login_node_does_not_import_torch(statement: str, tmp_path: Path) -> None:
    check = "import sys; heavy = {'torch', 'transformers', 'tensorboard'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", f"{statement}\n{check}"], check=True, cwd=tmp_path, timeout=60)
