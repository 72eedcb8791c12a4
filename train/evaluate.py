"""Evaluation on held-out samples: loss, and bits per byte where the tokenizer tells its bytes."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.config import TrainConfig
from train.data.loader import TokenWindows, validation_batches
from train.mesh import Mesh
from train.model.llama import IGNORED
from train.parallel.engine import Engine
from train.resilience.pulse import Phase, beat
from train.resilience.stop import Agreement


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation, the same on every rank and for every number of ranks."""

    loss: float
    """Mean cross entropy, nats a token."""
    tokens: int
    bits_per_byte: float | None
    """None when the tokenizer does not tell how many bytes a token stands for."""

    def as_metrics(self) -> dict[str, float]:
        """Return what goes into a metrics line."""
        values = {"eval_loss": self.loss, "eval_tokens": float(self.tokens)}
        if self.bits_per_byte is not None:
            values["eval_bits_per_byte"] = self.bits_per_byte
        return values


class Evaluator:
    """Evaluates a model on the first `loop.eval_batches` global batches of the held-out windows."""

    def __init__(
        self,
        config: TrainConfig,
        windows: TokenWindows | None,
        device: torch.device,
        group: dist.ProcessGroup,
        agreement: Agreement,
        mesh: Mesh,
    ) -> None:
        """`windows`: the held-out split, None when there is nothing to evaluate on; `group`: gloo, all ranks."""
        self.windows = windows
        self.tokenizer = None if windows is None else windows.load_tokenizer()
        self._config = config
        self._device = device
        self._group = group
        self._agreement = agreement
        self._mesh = mesh
        token_bytes = None if self.tokenizer is None else self.tokenizer.token_bytes()
        self._token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes).to(device)

    @property
    def samples(self) -> int:
        """Number of held-out samples that an evaluation reads."""
        if self.windows is None:
            return 0
        return min(self.windows.count, self._config.loop.eval_batches * self._config.loop.samples_per_step)

    @torch.no_grad()
    def run(self, engine: Engine) -> Evaluation | None:
        """Evaluate; None when there is nothing to evaluate on or a stop was requested meanwhile."""
        if self.windows is None or self.samples == 0:
            return None
        # Sums in float64: the result must not depend on how the samples were dealt to the ranks.
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        batches = validation_batches(
            self.windows,
            self.samples,
            self._config.parallel.micro_batch_size,
            self._mesh.dp.get_local_rank(),
            self._mesh.dp.size(),
            engine.batches_at_once,
        )
        # Ranks of one tensor-parallel group have the same loss.
        counts = self._mesh.coordinate("tp") == 0
        # Counted where the samples are read, which ranks of all other axes do too.
        reads = counts and self._mesh.coordinate("pp") == 0 and self._mesh.coordinate("cp") == 0
        for micro_batches in batches:
            beat(Phase.EVALUATE)
            self._agreement.begin()
            nats = engine.evaluate(micro_batches)
            if counts:
                sums[0] += nats
            for batch in micro_batches if reads else ():
                targets = batch.targets[batch.targets != IGNORED].to(self._device)
                sums[1] += targets.numel()
                if self._token_bytes is not None:
                    sums[2] += self._token_bytes[targets].sum()
            if self._agreement.decide().stop:
                return None
        sums = sums.cpu()
        dist.all_reduce(sums, group=self._group)
        nats, tokens, text_bytes = sums.tolist()
        bits_per_byte = nats / math.log(2) / text_bytes if text_bytes else None
        return Evaluation(loss=nats / tokens, tokens=int(tokens), bits_per_byte=bits_per_byte)
