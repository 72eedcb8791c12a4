"""Continue a text with a trained model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from contract.errors import UserError
from contract.run_folder import RunFolder
from train.checkpoint.errors import DamagedError
from train.checkpoint.manifest import NAME, Manifest, read_manifest
from train.checkpoint.reader import SafeReader, damage, load_tree
from train.config import read_config
from train.data.metadata import Metadata
from train.model.config import ModelConfig
from train.model.hf import write_hf
from train.model.llama import Llama, build


def newest_whole(run: RunFolder) -> Manifest:
    """Return the manifest of the newest whole checkpoint of a run; raise `UserError` when there is none."""
    problems = []
    for step in reversed(run.published_steps()):
        found = damage(run.checkpoints / f"step_{step}")
        if found is None:
            return read_manifest(run.checkpoints / f"step_{step}")
        problems.append(f"step_{step}: {found}")
    raise UserError(f"run folder {run.path} has no whole checkpoint to read ({_why_none(run, problems)}")


def _why_none(run: RunFolder, problems: list[str]) -> str:
    """Say why there is nothing, by what is wrong with its steps, the newest first, and what to do."""
    if problems:
        more = f", and {len(problems) - 1} older ones are not whole either" if len(problems) > 1 else ""
        return f"{problems[0]}{more}): look at it with `trierarch ckpt validate {run.path}`"
    places = (NAME, f"*/{NAME}", f"checkpoints/*/{NAME}")
    other = next((found.parent for place in places for found in run.path.glob(place)), None)
    if other is not None:
        return f"{other} does not count: it is not {run.checkpoints}/step_N): look at it with `trierarch ckpt validate`"
    return "it has none): train it first"


def load_model(run: RunFolder) -> tuple[Llama, Manifest]:
    """Load the model alone of the newest whole checkpoint, on the CPU, without a process group."""
    manifest = newest_whole(run)
    model = build(ModelConfig(**manifest.model), seed=None, device=torch.device("cpu"))
    tree = {"model": model.state_dict()}
    folder = run.checkpoints / f"step_{manifest.step}"
    try:
        load_tree(tree, SafeReader(folder, manifest))
    except DamagedError as error:
        raise UserError(
            f"checkpoint {folder} is damaged: {error}: move the folder away to use an older one"
        ) from error
    model.load_state_dict(tree["model"])
    return model.eval(), manifest


def generate(folder: Path, prompt: str, *, count: int, temperature: float, top_k: int, seed: int) -> str:
    """Return `prompt` with up to `count` tokens after it, by the newest whole checkpoint of a run folder."""
    run = RunFolder(folder)
    model, _ = load_model(run)
    config = read_config(run.config)
    prefix = Path(config.data.prefix)
    tokenizer = Metadata.read(prefix).load_tokenizer(prefix)
    ids = [int(token) for token in tokenizer.encode(prompt)]
    if not ids:
        raise UserError("the prompt is empty: give --prompt some text to continue")
    drawn = sample(
        model,
        ids,
        count,
        context=config.data.sequence_length,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        stop_at=tokenizer.eod_id,
    )
    return prompt + tokenizer.decode(drawn)


def export(run: Path, folder: Path) -> int:
    """Write the newest whole checkpoint of a run folder in Hugging Face's layout; return its step.

    The tokenizer goes with it, unless the run was trained on bytes.
    """
    model, manifest = load_model(RunFolder(run))
    prefix = Path(read_config(RunFolder(run).config).data.prefix)
    metadata = Metadata.read(prefix)
    tokenizer = None if metadata.tokenizer == "bytes" else prefix.parent / metadata.tokenizer
    write_hf(folder, model.config, model.state_dict(), eos_id=metadata.eod_id, tokenizer=tokenizer)
    return manifest.step


@torch.no_grad()
def sample(
    model: torch.nn.Module,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
    stop_at: int | None = None,
) -> list[int]:
    """Draw up to `count` tokens after `prompt`; ends early at the token `stop_at`. Temperature 0 takes the likeliest.

    The model sees the last `context` tokens at each step.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], dtype=torch.int64, device=device)
        logits = model(window)[0, -1].float().cpu()
        if temperature == 0:
            drawn = int(logits.argmax())
        else:
            best = logits.topk(min(top_k, logits.numel()))
            chances = torch.softmax(best.values / temperature, dim=-1)
            drawn = int(best.indices[torch.multinomial(chances, 1, generator=generator)])
        if drawn == stop_at:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]
