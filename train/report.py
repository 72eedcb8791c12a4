"""What a finished run shows its user: how good it became, a sample, and where to look."""

import shutil
import sys
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from train.data.loader import TokenWindows
from train.data.tokenizer import Tokenizer
from train.evaluate import Evaluation
from train.generate import load_model, sample
from train.loop import Parts
from train.model.config import parameter_count

SAMPLE_TOKENS = 160
PROMPT_TOKENS = 40
MAX_ZLIB_BYTES = 2**26
MAX_SAMPLE_PARAMETERS = 500e6
"""A model that is spread over ranks is read back from its checkpoint for a sample, on one CPU core."""


def report(parts: Parts, evaluation: Evaluation | None) -> None:
    """Print the closing lines of rank 0."""
    say, run, step = parts.progress.say, parts.run, parts.state.step
    say(f"finished: step {step}, {parts.state.tokens:,} tokens")
    windows, tokenizer = parts.evaluator.windows, parts.evaluator.tokenizer
    if evaluation is not None and windows is not None and tokenizer is not None:
        say(_quality(evaluation, windows, tokenizer, parts.evaluator.samples))
        if (model := _whole_model(parts)) is not None:
            say("\na sample that continues held-out text after [...]:\n")
            say(_sample(parts, model, windows, tokenizer) + "\n")
    say(f"checkpoint  {run.checkpoints / f'step_{parts.checkpoints.newest_step}'}")
    say(f"metrics     {run.metrics}")
    if parts.config.monitor.tensorboard:
        # Outside an activated environment the command is not in PATH.
        beside = Path(sys.executable).with_name("tensorboard")
        command = "tensorboard" if shutil.which("tensorboard") or not beside.exists() else str(beside)
        say(f"curves      {command} --logdir {run.tensorboard}")


def _quality(evaluation: Evaluation, windows: TokenWindows, tokenizer: Tokenizer, samples: int) -> str:
    text = f"validation loss {evaluation.loss:.4f} over {evaluation.tokens:,} held-out tokens"
    if evaluation.bits_per_byte is None:
        return text
    text += f": {evaluation.bits_per_byte:.3f} bits per byte"
    held_out = tokenizer.decode(windows.targets(samples)).encode()
    if 0 < len(held_out) <= MAX_ZLIB_BYTES:
        bits = 8 * len(zlib.compress(held_out, level=9)) / len(held_out)
        text += f" (zlib level 9 on the same bytes: {bits:.3f})"
    return text


def _whole_model(parts: Parts) -> nn.Module | None:
    """The trained model in one piece; None where it is spread over ranks and too large to read back."""
    part = parts.state.parts[0]
    if parts.mesh.dims.pp == parts.mesh.dims.cp == 1 and not any(
        isinstance(tensor, DTensor) for tensor in part.parameters()
    ):
        return part
    if parameter_count(parts.config.model) > MAX_SAMPLE_PARAMETERS:
        return None
    model, _ = load_model(parts.run)
    return model


def _sample(parts: Parts, model: nn.Module, windows: TokenWindows, tokenizer: Tokenizer) -> str:
    prompt = windows.targets(1)[:PROMPT_TOKENS]
    # Compiled layers would be compiled anew while the text grows.
    with torch.compiler.set_stance("force_eager"):
        drawn = sample(
            model,
            prompt.tolist(),
            SAMPLE_TOKENS,
            context=parts.config.data.sequence_length,
            seed=parts.config.seed,
            stop_at=tokenizer.eod_id,
        )
    return f"{tokenizer.decode(prompt)}[...]{tokenizer.decode(drawn)}"
