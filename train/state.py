"""TrainState: all that must survive a restart, with one state_dict()."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from train.model.config import ModelConfig
from train.parallel.fill import global_name


@dataclass
class TrainState:
    """The model, its optimizer, the position in the run and in the data, and the random generators.

    `state_dict` is collective where parameters are sharded. What it returns holds tensors only, so that a
    checkpoint can be read without unpickling.
    """

    parts: nn.ModuleList
    """What this rank holds of the model: see `train.parallel.apply.Sharded`."""
    optimizer: torch.optim.Optimizer
    config: ModelConfig
    rank: int = 0
    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed by these steps: the position in the data."""
    tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything as a tree of tensors; random generators are kept for each rank.

        Names are those of the whole model, whatever part of it is here.
        """
        model, optimizer = get_state_dict(self.parts, self.optimizer)
        moments: dict[str, Any] = optimizer["state"]  # type: ignore[assignment]
        progress = {"step": self.step, "samples": self.samples, "tokens": self.tokens}
        return {
            "model": {self._global_name(name): value for name, value in model.items()},
            # Hyperparameters belong to the configuration: a changed weight decay must not come back from here.
            "optimizer": {self._global_name(name): value for name, value in moments.items()},
            "progress": {name: torch.tensor(value, dtype=torch.int64) for name, value in progress.items()},
            "rng": {f"rank_{self.rank}": _rng_state()},
        }

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a tree of `state_dict`; hyperparameters of the optimizer stay as they were built."""
        groups = get_optimizer_state_dict(self.parts, self.optimizer)["param_groups"]
        names = [name for name, _ in self.parts.named_parameters()]
        model = {name: tree["model"][self._global_name(name)] for name in names}
        moments: dict[str, Any] = {}
        taken = set()
        for name in names:
            whole = self._global_name(name)
            moments[name] = tree["optimizer"][whole]
            if whole in taken:  # the optimizer keeps what it is given: two parameters must not share it
                moments[name] = {kind: value.clone() for kind, value in moments[name].items()}
            taken.add(whole)
        optimizer = {"state": moments, "param_groups": groups}
        set_state_dict(self.parts, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        progress = {name: int(value) for name, value in tree["progress"].items()}
        self.step, self.samples, self.tokens = progress["step"], progress["samples"], progress["tokens"]
        # A generator that the saving world did not have (of another rank, of a GPU) stays as it was seeded.
        _set_rng_state(tree["rng"].get(f"rank_{self.rank}", {}))

    def _global_name(self, name: str) -> str:
        return global_name(name.partition(".")[2], self.config)


def seed_everything(seed: int, rank: int) -> None:
    """Seed every generator; each rank draws from a stream of its own."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def _rng_state() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    assert version == 3 and gauss is None, "random.gauss keeps state that is not saved"
    name, keys, position, has_gauss, _ = np.random.get_state(legacy=True)
    assert name == "MT19937" and not has_gauss
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.tensor([*keys.tolist(), position], dtype=torch.int64),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    if "python" in state:
        random.setstate((3, tuple(state["python"].tolist()), None))
    if "numpy" in state:
        *keys, position = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
