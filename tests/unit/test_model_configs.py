import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.compose import FOLDER
from train.config import load_config
from train.model.config import parameter_count
from train.model.llama import Llama

MODELS = sorted((FOLDER / "model").glob("*.yaml"))


def test_the_models_of_the_product_are_there() -> None:
    expected = {"llama_1m", "llama_3m", "llama_25m", "llama_125m", "llama_1b"}
    expected |= {"deepseek_7b", "deepseek_67b", "gpt3_175b"}
    assert expected <= {path.stem for path in MODELS}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_composes_builds_and_has_the_parameters_it_states(path: Path) -> None:
    stated = re.search(r"^# Parameters: ([\d,]+) at vocab_size (\d+)", path.read_text(), re.MULTILINE)
    assert stated is not None, "state the number of parameters"
    count, vocab_size = int(stated[1].replace(",", "")), int(stated[2])
    model = load_config([f"model={path.stem}"]).model
    assert model.name == path.stem
    assert model.vocab_size in (None, vocab_size)
    model = dataclasses.replace(model, vocab_size=vocab_size)
    assert parameter_count(model) == count
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Llama(model).parameters()) == count


@pytest.mark.parametrize(
    ("name", "billions"), [("deepseek_7b", 6.9), ("deepseek_67b", 67.4), ("gpt3_175b", 175.2)]
)
def test_published_models_have_their_published_size(name: str, billions: float) -> None:
    assert round(parameter_count(load_config([f"model={name}"]).model) / 1e9, 1) == billions


def test_the_shape_needs_no_torch() -> None:
    code = "import sys, train.model.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, check=True, timeout=60)
