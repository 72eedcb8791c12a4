"""TrainState: all that must survive a restart, with one state_dict()."""

import random
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from train.checkpoint.references import References
from train.checkpoint.stored import Path, ReadInto, Stored
from train.model.config import ModelConfig
from train.optim.adamw import AdamW, AnyAdamW
from train.optim.compact import CompactAdamW
from train.optim.master import MasterAdamW
from train.parallel.fill import Read, fill, global_name
from train.precision.state import PrecisionState


@dataclass
class TrainState:
    """The model, its optimizer, the position in the run and in the data, and the random generators.

    `state_dict` is collective where parameters are sharded. What it returns holds tensors only, so that a
    checkpoint can be read without unpickling.
    """

    parts: nn.ModuleList
    """What this rank holds of the model: see `train.parallel.apply.Sharded`."""
    optimizer: AnyAdamW
    config: ModelConfig
    rank: int = 0
    step: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples consumed by these steps: the position in the data."""
    tokens: int = 0
    precision: PrecisionState = field(default_factory=PrecisionState)
    _references: References = field(default_factory=References)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as a tree of tensors; random generators are kept for each rank.

        Names are those of the whole model, whatever part of it is here. Tensors that lie elsewhere have a shape and
        no values, see `stored`.
        """
        model, moments = self._training_state()
        progress = {"step": self.step, "samples": self.samples, "tokens": self.tokens}
        tree = {
            "model": model,
            # Hyperparameters belong to the configuration: a changed weight decay must not come back from here.
            "optimizer": moments,
            "progress": {name: torch.tensor(value, dtype=torch.int64) for name, value in progress.items()},
            "rng": {f"rank_{self.rank}": _rng_state()},
        }
        precision = self.precision.state_dict()
        return tree | {"precision": precision} if precision else tree

    def _training_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights and moments by their names in the whole model."""
        if isinstance(self.optimizer, (MasterAdamW, CompactAdamW)):
            return self.optimizer.whole_state()
        return self._references.of(self.optimizer, self._listed)

    def _listed(self) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = get_state_dict(self.parts, self.optimizer)
        moments: dict[str, Any] = optimizer["state"]  # type: ignore[assignment]
        return (
            {self._global_name(name): value for name, value in model.items()},
            {self._global_name(name): value for name, value in moments.items()},
        )

    def fill(self, read: Read) -> None:
        """Give all weights the values that `read` returns."""
        if isinstance(self.optimizer, (MasterAdamW, CompactAdamW)):
            self.optimizer.fill(read)
            return
        for part in self.parts:
            fill(part, self.config, read)

    def stored(self) -> dict[Path, Stored]:
        """The values of those tensors of `state_dict` that have none, by their path; until the next step."""
        return self.optimizer.stored() if isinstance(self.optimizer, (MasterAdamW, CompactAdamW)) else {}

    def load(self, read: ReadInto, saved: Collection[str]) -> None:
        """Take over what was saved of a `state_dict`; hyperparameters of the optimizer stay as they were built.

        `read` is given parts of the tree in turn; `saved` has the names of what there is, keys joined by dots.
        """
        progress = {name: torch.tensor(0) for name in ("step", "samples", "tokens")}
        # A generator that the saving world did not have (of another rank, of a GPU) stays as it was seeded.
        own = f"rank_{self.rank}"
        rng = {name: value for name, value in _rng_state().items() if f"rng.{own}.{name}" in saved}
        # What the precision of the saving run did not have starts anew.
        precision = {k: v for k, v in self.precision.state_dict().items() if f"precision.{k}" in saved}
        read({"progress": progress, "rng": {own: rng}} | ({"precision": precision} if precision else {}))
        if isinstance(self.optimizer, (MasterAdamW, CompactAdamW)):
            self.optimizer.load(read)
        else:
            self._load_training_state(read)
        # Last: where the values above are damaged, an older step is loaded as if this one had not been there.
        self.precision.load_state_dict(precision)
        self.step, self.samples, self.tokens = (int(value) for value in progress.values())
        _set_rng_state(rng)

    def _load_training_state(self, read: ReadInto) -> None:
        model_tree, moments_tree = self._training_state()
        if self._references.complete:
            read({"model": model_tree, "optimizer": moments_tree})
            return
        self._references.forget()
        read({"model": model_tree, "optimizer": moments_tree})
        assert isinstance(self.optimizer, AdamW)
        groups = get_optimizer_state_dict(self.parts, self.optimizer)["param_groups"]
        names = [name for name, _ in self.parts.named_parameters()]
        model = {name: model_tree[self._global_name(name)] for name in names}
        moments: dict[str, Any] = {}
        taken = set()
        for name in names:
            whole = self._global_name(name)
            moments[name] = moments_tree[whole]
            if whole in taken:  # the optimizer keeps what it is given: two parameters must not share it
                moments[name] = {kind: value.clone() for kind, value in moments[name].items()}
            taken.add(whole)
        optimizer = {"state": moments, "param_groups": groups}
        set_state_dict(self.parts, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

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
