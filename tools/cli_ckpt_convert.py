"""`trierarch ckpt convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contract.errors import ConfigError, UserError, closest
from tools.bytes_shown import bytes_bar, size

if TYPE_CHECKING:
    from tools.ckpt.convert_hf import HfModel


def convert_checkpoint(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint of any format; a run folder: its newest step.")
    ],
    target: Annotated[Path, typer.Argument(help="A new folder; for torch, a new file.")],
    to: Annotated[str, typer.Option("--to", help="trierarch, dcp, safetensors, hf or torch.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16 for floating weights and moments. Default: as they are."
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(help="`weights` leaves everything else out.")] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="STEP",
            help="A step or run whose model and data it has; for trierarch and hf, where SOURCE does not say.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Convert what is damaged, too.")] = False,
) -> None:
    """Write a checkpoint in another form, bit for bit; SOURCE is checked while it is read.

    Ends with 1 if SOURCE is damaged or the disk refuses, with 2 if SOURCE cannot be read at all.
    """
    import sys

    from tools.ckpt.convert import Form, Wish, convert
    from tools.ckpt.convert_dtype import TARGETS

    if to not in list(Form):
        raise ConfigError(f"--to {to}: there is no such form, {closest(to, list(Form))}")
    if dtype is not None and dtype not in TARGETS:
        raise ConfigError(f"--dtype {dtype}: weights cannot be converted to it, {closest(dtype, TARGETS)}")
    if only not in (None, "weights"):
        raise ConfigError(f"--only {only}: only `weights` can be chosen")
    form = Form(to)
    if like is not None and form not in (Form.TRIERARCH, Form.HF):
        raise ConfigError(f"--like does nothing with --to {form}: leave it out")
    with bytes_bar(source.name) as begin:
        done = convert(
            source,
            target,
            Wish(form, dtype, only == "weights", force, like),
            hf_of_manifest,
            begin,
        )
    for note in done.notes:
        print(note, file=sys.stderr)
    print(f"{target}: {done.tensors} tensors, {size(done.nbytes)}, from {done.source} ({done.format})")


def hf_of_manifest(model: dict[str, Any]) -> "HfModel":
    """Return the Hugging Face form of the model in a manifest; raises `UserError` where there is none."""
    from tools.ckpt.convert_hf import HfModel
    from train.model.config import ModelConfig, parameter_shapes
    from train.model.hf import config_to_hf, stored_name

    if not model:
        raise UserError(
            "the checkpoint does not say which model it is of: give --like a step or a run that does"
        )
    try:
        config = ModelConfig(**model)
        config.validate()
        shapes = {stored_name(name): shape for name, shape in parameter_shapes(config).items()}
    except (TypeError, ValueError, UserError) as reason:
        raise UserError(
            f"the model of the checkpoint cannot be built ({reason}): use the version it is of"
        ) from reason
    return HfModel(lambda dtype: config_to_hf(config, dtype, None), shapes)
