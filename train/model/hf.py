"""Read and write Hugging Face's files of a Llama: config.json and safetensors.

Both layouts of config.json are read, that of transformers 4 (`rope_theta`) and that of 5
(`rope_parameters`), and what is written suits both.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contract.errors import ConfigError, UserError
from train.model.config import ModelConfig, parameter_shapes

SHARD_BYTES = 5 * 10**9
"""Largest file that `write_hf` writes, unless one tensor alone is larger."""

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_ONLY: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
}
"""Keys of config.json that change the model, and the values (beside null) that this one stands for."""


def read_hf(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Shape and weights of the LlamaForCausalLM in `folder`, for `Llama.load_state_dict`.

    Tensors keep the type they have in the file and are mapped from it, not copied. Raises `UserError` for
    a missing or broken file, for a setting that this model does not have, and for a tensor that is
    missing, not expected or of the wrong shape.
    """
    config = _config_from(folder)
    shapes = parameter_shapes(config)
    state: dict[str, Tensor] = {}
    spare_head: Tensor | None = None
    for name, tensor in _stored_tensors(folder):
        if name.endswith(".rotary_emb.inv_freq"):
            continue  # A table, stored by early versions of transformers.
        if name == _HEAD and config.tie_embeddings:
            spare_head = tensor
            continue
        state[name if name == _HEAD else name.removeprefix("model.")] = tensor
    _check_tensors(state, shapes, str(folder))
    if spare_head is not None and not torch.equal(spare_head, state["embed_tokens.weight"]):
        raise UserError(
            f"{folder}: {_HEAD} differs from the embedding though tie_word_embeddings is true in {_CONFIG}: "
            "set it to false, or remove the tensor"
        )
    return config, state


def write_hf(
    folder: Path,
    config: ModelConfig,
    state_dict: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    eos_id: int | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Write `state_dict` (whole tensors of a `Llama`) as a LlamaForCausalLM that transformers loads.

    `dtype` converts the weights, None keeps the type of each; `eos_id` is the token at which generation ends,
    `tokenizer` a tokenizer.json that goes with it.
    `folder` appears whole, by one rename, and
    must not hold anything yet. Raises `UserError` if it does, if it cannot be written, and for a state
    that does not belong to `config`.
    """
    _check_tensors(state_dict, parameter_shapes(config), "the model to export")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder: give a new one to export to")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            # Not the temporary folder itself: that one is closed to other users.
            draft = Path(temporary) / "draft"
            draft.mkdir()
            _write_tensors(draft, state_dict, dtype)
            stored_dtype = dtype or state_dict["embed_tokens.weight"].dtype
            name = str(stored_dtype).removeprefix("torch.")
            _write_json(draft / _CONFIG, config_to_hf(config, name, eos_id))
            if tokenizer is not None:
                shutil.copyfile(tokenizer, draft / "tokenizer.json")
            draft.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from error


def _config_from(folder: Path) -> ModelConfig:
    path = folder / _CONFIG
    raw = _read_json(path)
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if raw.get("model_type") != "llama" or architectures != ["LlamaForCausalLM"]:
        raise UserError(
            f"{path}: model_type={raw.get('model_type')} with architectures={architectures} is not "
            "supported: give a LlamaForCausalLM"
        )
    for key, values in _ONLY.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise UserError(f"{path}: {key}={raw[key]} is not supported: this model does not have it")
    try:
        config = ModelConfig(
            name=folder.resolve().name,
            vocab_size=int(raw["vocab_size"]),
            dim=int(raw["hidden_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=int(raw["num_attention_heads"]),
            kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            ffn_dim=int(raw["intermediate_size"]),
            max_sequence_length=int(raw.get("max_position_embeddings", 2048)),
            rope_theta=_rope_theta(path, raw),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            init_std=float(raw.get("initializer_range", 0.02)),
        )
        config.validate()
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from error
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing, is the file whole?") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: a size is not a number ({error}), is the file whole?") from error
    if raw.get("head_dim") not in (None, config.head_dim):
        raise UserError(
            f"{path}: head_dim={raw['head_dim']} is not supported: heads of this model are hidden_size / "
            f"num_attention_heads = {config.head_dim} wide"
        )
    return config


def _rope_theta(path: Path, raw: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies, in the order in which transformers looks for it."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = dict(raw.get(key) or {})
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0))
    kinds = {rope.pop("rope_type", "default"), rope.pop("type", "default")}
    if kinds != {"default"} or rope.pop("partial_rotary_factor", 1) != 1 or rope:
        raise UserError(f"{path}: {key}={raw[key]} is not supported: this model has plain rotary embeddings")
    return float(theta)


def config_to_hf(config: ModelConfig, dtype_name: str, eos_id: int | None) -> dict[str, Any]:
    """Return the content of config.json; `dtype_name`: of the weights, `eos_id`: the token that ends a text."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_dim // config.head_dim,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        # Both where transformers 4 looks and where 5 does.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
        # transformers' own defaults, 1 and 2, are ordinary tokens here.
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = [_WEIGHTS]
    if not (folder / _WEIGHTS).exists():
        if not (folder / _INDEX).exists():
            raise UserError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}: give a folder with safetensors")
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{folder / _INDEX}: weight_map is missing, is the file whole?")
        files = sorted(set(weight_map.values()))
    for file in files:
        path = folder / file
        try:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a dict, it cannot be iterated
                    yield name, stored.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}): copy it again") from error


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    for name, tensor in tensors.items():
        if name not in shapes:
            raise UserError(f"{where}: tensor {name} does not belong to this model")
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{where}: tensor {name} is {list(tensor.shape)}, must be {list(shapes[name])}")
    for name in shapes:
        if name not in tensors:
            raise UserError(f"{where}: tensor {name} is missing")


def _write_tensors(folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    sizes = {name: tensor.numel() * (dtype or tensor.dtype).itemsize for name, tensor in state.items()}
    shards = _shards(sizes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [_WEIGHTS]
    for file, names in zip(files, shards, strict=True):
        tensors = {
            stored_name(name): state[name].detach().to(device="cpu", dtype=dtype).contiguous()
            for name in names
        }
        # Without this mark transformers 4 refuses the file.
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors closes its files to others; these are as open as their folder.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
    if len(shards) > 1:
        weight_map = {
            stored_name(name): file for file, names in zip(files, shards, strict=True) for name in names
        }
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / _INDEX, index)


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """Cut the names, in order, into groups of at most `SHARD_BYTES`."""
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name, size_bytes in sizes.items():
        if shards[-1] and filled_bytes + size_bytes > SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += size_bytes
    return shards


def stored_name(name: str) -> str:
    """Return the name that a parameter of `parameter_shapes` has in Hugging Face's files."""
    return name if name == _HEAD else f"model.{name}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give a folder that Hugging Face's tools wrote") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a JSON object: copy it again")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
