import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ConfigError
from train.model.config import ModelConfig, flops_per_token, parameter_count, parameter_shapes
from train.model.llama import Llama, build, document_mask, initial_rows, next_token_loss, rope_tables

TINY = ModelConfig(
    vocab_size=64, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=48, max_sequence_length=24, init_std=0.2
)


def tiny(**changes: object) -> ModelConfig:
    return ModelConfig(**{**vars(TINY), **changes})  # type: ignore[arg-type]


def tokens(batch: int, sequence: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 64, (batch, sequence), generator=generator)


shapes = st.builds(
    lambda groups, kv_heads, half, layers, ffn_dim, vocab_size, tie: ModelConfig(
        vocab_size=vocab_size,
        dim=groups * kv_heads * 2 * half,
        layers=layers,
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        tie_embeddings=tie,
    ),
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    half=st.integers(1, 8),
    layers=st.integers(1, 5),
    ffn_dim=st.integers(1, 64),
    vocab_size=st.integers(1, 300),
    tie=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_shapes_and_count_are_those_of_the_built_model(config: ModelConfig) -> None:
    config.validate()
    with torch.device("meta"):
        model = Llama(config)
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    assert set(model.state_dict()) == set(built)


@pytest.mark.parametrize("tie", [False, True])
def test_flops_are_those_of_the_matrix_products(tie: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config, sequence = tiny(kv_heads=4, tie_embeddings=tie), 16
    model = build(config, 0, "cpu")
    # The counter leaves the CPU's fused attention out: count the plain products instead.
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        next_token_loss(model(tokens(2, sequence)), tokens(2, sequence, 1)).backward()
    assert counter.get_total_flops() / (2 * sequence) == flops_per_token(config, sequence)


def test_a_count_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        parameter_count(tiny(vocab_size=None))


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    model = build(TINY, 0, "cpu")
    assert model(tokens(1, 24)).shape == (1, 24, 64)
    with pytest.raises(ConfigError, match="max_sequence_length=24"):
        model(tokens(1, 25))


def test_nothing_sees_the_future() -> None:
    model = build(TINY, 0, "cpu")
    first, second = tokens(1, 20), tokens(1, 20)
    second[0, 12:] = tokens(1, 8, seed=9)
    torch.testing.assert_close(model(first)[:, :12], model(second)[:, :12])
    assert not torch.allclose(model(first)[:, 12:], model(second)[:, 12:])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_masked_documents_equal_documents_alone(kv_heads: int) -> None:
    model = build(tiny(kv_heads=kv_heads), 0, "cpu")
    lengths, sample = [5, 1, 9, 3], tokens(2, 18)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    together = model(sample, documents)
    alone = torch.cat([model(part) for part in sample.split(lengths, 1)], 1)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)
    assert (model(sample) - alone).abs().max() > 1e-2


def test_one_document_is_plain_causal_attention() -> None:
    model = build(TINY, 0, "cpu")
    sample = tokens(2, 18)
    torch.testing.assert_close(model(sample, torch.full((2, 18), 7)), model(sample), atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_document_mask_is_causal_and_within_a_document(documents: list[list[int]]) -> None:
    mask = document_mask(torch.tensor(documents))
    for row, numbers in enumerate(documents):
        for query in range(6):
            for key in range(6):
                expected = key <= query and numbers[key] == numbers[query]
                assert bool(mask[row, 0, query, key]) == expected


def test_weights_depend_on_seed_and_name_only() -> None:
    model = build(TINY, 5, "cpu")
    torch.manual_seed(123)
    eager = Llama(TINY)
    eager.init_weights(5)
    deeper = dict(build(tiny(layers=4), 5, "cpu").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(eager.named_parameters())[name])
        assert torch.equal(parameter, initial_rows(TINY, 5, name, parameter.shape))
        if "o_proj" not in name and "down_proj" not in name:
            assert torch.equal(parameter, deeper[name])
    assert not torch.equal(model.layers["0"].mlp.up_proj.weight, model.layers["0"].mlp.gate_proj.weight)
    other = dict(build(TINY, 6, "cpu").named_parameters())
    assert not torch.equal(model.layers["0"].mlp.up_proj.weight, other["layers.0.mlp.up_proj.weight"])


def test_drawing_weights_leaves_torchs_generator_and_its_defaults_alone() -> None:
    expected = initial_rows(TINY, 1, "norm.weight.of.a.matrix", (8, 8))
    state = torch.get_rng_state()
    with torch.device("meta"):
        assert torch.equal(initial_rows(TINY, 1, "norm.weight.of.a.matrix", (8, 8)), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_have_the_stated_spread() -> None:
    config = ModelConfig(vocab_size=512, dim=256, layers=8, heads=4, ffn_dim=256)
    model = build(config, 0, "cpu")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
        expected = 0.02 / math.sqrt(16) if narrow else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(parameter.mean().item()) < expected * 0.03, name


def test_rope_tables_are_rebuilt_in_fp32_and_not_saved() -> None:
    with torch.device("meta"):
        model = Llama(TINY)
    model.to(torch.bfloat16).to_empty(device="cpu")
    cos, sin = rope_tables(TINY, torch.device("cpu"))
    assert torch.equal(model.rope_cos, cos)
    assert torch.equal(model.rope_sin, sin)
    assert not any("rope" in name for name in model.state_dict())


def test_two_stages_make_the_whole() -> None:
    whole = build(TINY, 0, "cpu")
    first, last = build(TINY, 0, "cpu"), build(TINY, 0, "cpu")
    del first.layers["1"], first.layers["2"], last.layers["0"]
    first.norm = first.lm_head = None
    last.embed_tokens = None
    assert set(whole.state_dict()) == {*first.state_dict(), *last.state_dict()}
    assert torch.equal(last(first(tokens(2, 10))), whole(tokens(2, 10)))


def test_a_tied_model_trains_its_embedding_through_the_head() -> None:
    model = build(tiny(tie_embeddings=True), 0, "cpu")
    next_token_loss(model(torch.zeros(1, 4, dtype=torch.long)), tokens(1, 4)).backward()
    assert model.embed_tokens is not None
    gradient = model.embed_tokens.weight.grad
    # Row 0 is the only one that is looked up.
    assert gradient is not None and gradient[1:].abs().sum() > 0


def test_loss_is_the_mean_over_targets_that_count() -> None:
    logits = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = tokens(2, 3)
    targets[0, 1] = targets[1, 2] = -100
    loss = next_token_loss(logits, targets)
    terms = [
        -logits[row, position].float().log_softmax(-1)[targets[row, position]]
        for row in range(2)
        for position in range(3)
        if targets[row, position] != -100
    ]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.stack(terms).mean())


@pytest.mark.req("A14")
def test_bf16_autocast_stays_close_to_fp32() -> None:
    model = build(TINY, 0, "cpu")
    sample, targets = tokens(4, 16), tokens(4, 16, 1)
    exact = next_token_loss(model(sample), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = next_token_loss(model(sample), targets)
    assert rounded.item() == pytest.approx(exact.item(), rel=0.01)
    assert rounded.item() != exact.item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 30}, "model.dim=30 and model.heads=4"),
        ({"kv_heads": 3}, "model.kv_heads=3"),
        ({"layers": 0}, "model.layers=0"),
        ({"vocab_size": -1}, "model.vocab_size=-1"),
        ({"init_std": -0.1}, "model.init_std=-0.1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(**change).validate()
