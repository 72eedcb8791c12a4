"""`trierarch data`: make and look at token files."""

from pathlib import Path
from typing import Annotated

import typer

from contract.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Make token files of text, and look at them.")

STDLIB = "python-stdlib"


@app.command()
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help=f"Text files, .jsonl files, folders, or `{STDLIB}`: the source of Python's own library."
        ),
    ],
    prefix: Annotated[Path, typer.Option(help="Where to write: PREFIX.bin, .idx, .json.")],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, or a Hugging Face tokenizer.json.")] = "bytes",
    train_bpe: Annotated[
        int | None, typer.Option(help="Train a byte-level BPE tokenizer of this vocabulary on the sources.")
    ] = None,
    glob: Annotated[str, typer.Option(help="Which files of a folder.")] = "**/*",
    json_key: Annotated[str, typer.Option(help="The key of the text in .jsonl files.")] = "text",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one for each core.")] = None,
    shuffle_seed: Annotated[
        int | None,
        typer.Option(help="Shuffle the files of folders, so that the held-out tail is like the rest."),
    ] = None,
    eod: Annotated[
        str | None, typer.Option(help="The tokenizer's end-of-document token, when unclear.")
    ] = None,
) -> None:
    """Tokenise text into memory-mapped files in Megatron's layout; an interrupted run continues."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from train.data.prepare import prepare as prepare_files
    from train.data.sources import STDLIB_EXCLUDED, python_stdlib

    paths = [Path(source) for source in sources]
    exclude: frozenset[str] = frozenset()
    if STDLIB in sources:
        if len(sources) > 1 or glob != "**/*":
            raise ConfigError(f"{STDLIB} is a source of its own: give no other source and no --glob with it")
        paths, exclude, glob = [python_stdlib()], STDLIB_EXCLUDED, "**/*.py"
        shuffle_seed = 0 if shuffle_seed is None else shuffle_seed
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=None)
        report = prepare_files(
            paths,
            prefix,
            tokenizer,
            train_bpe=train_bpe,
            glob=glob,
            exclude=exclude,
            json_key=json_key,
            workers=workers,
            shuffle_seed=shuffle_seed,
            eod=eod,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _show(prefix)
    if report.reused == report.shards:
        print("made of the same sources before: there was nothing to do")
    elif report.reused:
        print(f"{report.reused} of {report.shards} parts were ready from before")


@app.command()
def info(prefix: Annotated[Path, typer.Argument(help="PREFIX of PREFIX.bin and .idx.")]) -> None:
    """Show what token files hold."""
    _show(prefix)


def _show(prefix: Path) -> None:
    from train.data.indexed import IndexedTokens
    from train.data.metadata import Metadata

    metadata = Metadata.read(prefix)
    IndexedTokens(prefix)  # refuses files that are cut or damaged
    print(f"{prefix}: {metadata.documents:,} documents, {metadata.tokens:,} tokens ({metadata.dtype})")
    print(f"  text       {metadata.text_bytes:,} bytes")
    print(f"  tokenizer  {metadata.tokenizer}, vocabulary {metadata.vocab_size:,}")
    for reason, count in metadata.skipped.items():
        print(f"  left out   {count:,} {reason}")
