import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from contract.errors import UserError
from train.model import hf
from train.model.config import ModelConfig
from train.model.llama import Llama, build

LAYOUTS = [
    pytest.param(kv_heads, tie, id=f"kv{kv_heads}-{'tied' if tie else 'untied'}")
    for kv_heads in (4, 2, 1)
    for tie in (False, True)
]
SAMPLE = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(0))


def tiny(kv_heads: int = 2, tie: bool = False) -> ModelConfig:
    # Nothing here is a default of either side, so that a value that is dropped shows.
    return ModelConfig(
        name="tiny",
        vocab_size=96,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=kv_heads,
        ffn_dim=56,
        max_sequence_length=40,
        rope_theta=500.0,
        norm_eps=3e-3,
        tie_embeddings=tie,
        init_std=0.1,
    )


def randomised(config: ModelConfig) -> Llama:
    model = build(config, 3, "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def load(folder: Path) -> tuple[ModelConfig, Llama]:
    config, state = hf.read_hf(folder)
    model = build(config, 0, "cpu")
    model.load_state_dict(state)
    return config, model


def assert_same_logits(ours: Llama, theirs: Any) -> None:
    with torch.no_grad():
        difference = (ours(SAMPLE) - theirs(SAMPLE).logits).abs().max().item()
    assert difference < 1e-5


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "exported"
    hf.write_hf(folder, tiny(), randomised(tiny()).state_dict())
    return folder


@pytest.mark.parametrize(("kv_heads", "tie"), LAYOUTS)
def test_transformers_reads_our_export(tmp_path: Path, kv_heads: int, tie: bool) -> None:
    from transformers import LlamaForCausalLM

    model = randomised(tiny(kv_heads, tie))
    hf.write_hf(tmp_path / "out", model.config, model.state_dict())
    theirs, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert_same_logits(model, theirs)


@pytest.mark.parametrize(("kv_heads", "tie"), LAYOUTS)
def test_we_read_what_transformers_saves(tmp_path: Path, kv_heads: int, tie: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=40,
        rms_norm_eps=3e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tie,
        initializer_range=0.1,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "tiny", max_shard_size="20KB")
    assert (tmp_path / "tiny" / "model.safetensors.index.json").exists()
    ours, model = load(tmp_path / "tiny")
    assert ours == tiny(kv_heads, tie)
    assert_same_logits(model, theirs)


def test_a_sharded_export_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    model = randomised(tiny())
    folder = tmp_path / "tiny"
    folder.mkdir()
    hf.write_hf(folder, model.config, model.state_dict())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    stored_bytes = [sum(t.nbytes for t in load_file(folder / file).values()) for file in files]
    assert max(stored_bytes) <= 20_000
    assert all(sum(pair) > 20_000 for pair in pairwise(stored_bytes))
    config, loaded = load(folder)
    assert config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(loaded.named_parameters())[name])
    assert_same_logits(model, LlamaForCausalLM.from_pretrained(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 1)
    state = randomised(tiny()).state_dict()
    hf.write_hf(tmp_path / "out", tiny(), state)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(state)


def test_an_export_says_all_that_either_version_of_transformers_looks_for(exported: Path) -> None:
    raw = json.loads((exported / "config.json").read_text())
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 500.0
    assert raw["torch_dtype"] == raw["dtype"] == "float32"
    with safe_open(exported / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}


def test_an_export_converts_its_type(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    state = randomised(tiny()).state_dict()
    hf.write_hf(tmp_path / "out", tiny(), state, dtype=torch.bfloat16)
    _, stored = hf.read_hf(tmp_path / "out")
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in state.items())
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_an_import_can_be_exported_again(exported: Path, tmp_path: Path) -> None:
    config, state = hf.read_hf(exported)
    hf.write_hf(tmp_path / "again", config, state)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        exported / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 700.0, "rope_parameters": None},
        {"rope_theta": 700.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 700}},
        {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 700}},
    ],
)
def test_the_base_of_the_positions_is_found_in_every_place(exported: Path, rope: dict[str, object]) -> None:
    change_config(exported, **rope)
    assert hf.read_hf(exported)[0].rope_theta == 700.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("head_dim", 16),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "unheard of"}),
        ("rope_parameters", {"rope_type": "default", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("model_type", "mistral"),
        ("architectures", ["LlamaForSequenceClassification"]),
    ],
)
def test_a_setting_that_the_model_does_not_have_is_refused(exported: Path, key: str, value: object) -> None:
    change_config(exported, **{key: value})
    with pytest.raises(UserError, match=rf"config\.json: .*{key}=.* not supported"):
        hf.read_hf(exported)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
def test_a_size_that_is_missing_or_no_number_is_named(exported: Path, key: str) -> None:
    raw = json.loads((exported / "config.json").read_text())
    change_config(exported, **{key: "many"})
    with pytest.raises(UserError, match="many"):
        hf.read_hf(exported)
    del raw[key]
    (exported / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=f"{key} is missing"):
        hf.read_hf(exported)


def test_a_shape_that_cannot_be_built_is_refused(exported: Path) -> None:
    change_config(exported, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"config\.json: model\.kv_heads=3"):
        hf.read_hf(exported)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NORM, None, "layers.1.input_layernorm.weight is missing"),
        ("lm_head.weight", None, "lm_head.weight is missing"),
        (NORM, torch.ones(7), r"layers.1.input_layernorm.weight is \[7\], must be \[32\]"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(56, 32), "layers.2.mlp.up_proj.weight does not"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(32), "layers.0.self_attn.q_proj.bias does not"),
    ],
)
def test_a_wrong_tensor_is_named(
    exported: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    change_tensors(exported, **{name: tensor})
    with pytest.raises(UserError, match=message):
        hf.read_hf(exported)


def test_tables_of_early_versions_are_passed_over(exported: Path) -> None:
    change_tensors(exported, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    hf.read_hf(exported)


def test_a_tied_model_may_carry_its_head_only_if_it_is_the_embedding(tmp_path: Path) -> None:
    config = tiny(tie=True)
    state = randomised(config).state_dict()
    hf.write_hf(tmp_path / "tied", config, state)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    change_tensors(tmp_path / "tied", **{"lm_head.weight": state["embed_tokens.weight"]})
    assert "lm_head.weight" not in hf.read_hf(tmp_path / "tied")[1]
    change_tensors(tmp_path / "tied", **{"lm_head.weight": state["embed_tokens.weight"] + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight differs"):
        hf.read_hf(tmp_path / "tied")


def test_a_broken_folder_is_one_sentence(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        hf.read_hf(tmp_path / "nowhere")
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        hf.read_hf(exported)
    weights.unlink()
    with pytest.raises(UserError, match="holds neither"):
        hf.read_hf(exported)
    index = exported / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(UserError, match="weight_map is missing"):
        hf.read_hf(exported)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(UserError, match=r"gone\.safetensors cannot be read"):
        hf.read_hf(exported)
    (exported / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        hf.read_hf(exported)


def test_an_export_overwrites_nothing(exported: Path) -> None:
    before = (exported / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="not an empty folder"):
        hf.write_hf(exported, tiny(), build(tiny(), 9, "cpu").state_dict())
    assert (exported / "model.safetensors").read_bytes() == before


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(hf, "_write_json", full)
    with pytest.raises(UserError, match="No space left"):
        hf.write_hf(tmp_path / "out", tiny(), build(tiny(), 9, "cpu").state_dict())
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_shape_is_not_exported(tmp_path: Path) -> None:
    state = build(tiny(), 9, "cpu").state_dict()
    with pytest.raises(UserError, match=r"lm_head\.weight does not belong"):
        hf.write_hf(tmp_path / "out", tiny(tie=True), state)
    assert not (tmp_path / "out").exists()
