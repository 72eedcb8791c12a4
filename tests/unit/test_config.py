"""The configuration is strict: what is misspelt or wrong is one sentence with the closest valid names."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.compose import choices, field_paths, flatten_yaml, to_yaml
from contract.errors import ConfigError
from contract.exit_codes import ExitCode
from train.config import TrainConfig, load_config, read_config

KEYS = [path for path in field_paths(TrainConfig) if "." in path]
DATA = "data.prefix=data/tokens"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.lrr=1", "optim.lrr: there is no such key, did you mean optim.lr"),
        ("lr=1", "lr: there is no such key, did you mean optim.lr?"),
        ("modl=llama_3m", "modl: there is no such key, did you mean model?"),
        ("model=llama_3", "model=llama_3: there is no such model, did you mean llama_3m"),
        ("recipe=null", "recipe=None: there is no such recipe"),
        ("precision=fp8", "there is no such precision"),
        ("optim.lr=fast", "optim.lr: Value 'fast'"),
        ("run.resume=nevr", "expected one of [auto, required, never]"),
        ("optim=3", "optim: this is a section: set keys in it"),
        ("optim.lr", "'optim.lr' is not a setting: write KEY=VALUE"),
        ("run.root=~/runs", "unusual characters go in quotes of their own: 'run.root=\"~/runs\"'"),
        ("seed=1,2", "one run takes one value (a comma in it goes in quotes of its own"),
        ("seed=null", "seed=null: it needs a value"),
        ("+optim.extra=1", "keys cannot be added or removed"),
        ("~optim.lr", "keys cannot be added or removed"),
        ("loop.steps=0", "loop.steps=0: must be above 0"),
        ("optim.lr=-1", "optim.lr=-1.0: must be at least 0"),
        ("optim.lr=nan", "optim.lr=nan: must be at least 0 and at most 1e+12"),
        ("optim.lr=inf", "optim.lr=inf: must be at least 0 and at most 1e+12"),
        ("loop.steps=99999999999999999999", "must be above 0 and at most 1e+12"),
        ("monitor.peak_tflops=0", "monitor.peak_tflops=0.0: must be above 0, or null"),
        ("resilience.start_timeout_s=inf", "resilience.start_timeout_s=inf"),
        ("optim.beta2=1", "optim.beta2=1.0: must be at least 0 and below 1"),
        ("data.sequence_length=4096", "longer than model.max_sequence_length=2048"),
        ("loop.global_batch_size=12", "no multiple of parallel.micro_batch_size=8"),
        ("data.validation_fraction=0", "data.validation_fraction=0 holds nothing out"),
        ("model.kv_heads=3", "model.kv_heads=3: must divide"),
        ("run.name=a/b", "run.name='a/b': give a name without /"),
        ("run.name=null", "run.name"),
        ("resilience.stop_signal=SIGUSR9", "choose SIGUSR2"),
        ("resilience.stop_signal=SIGTERM", "choose SIGUSR2"),
        (
            "resilience.checkpoint_timeout_s=5",
            "below resilience.collective_timeout_s=600.0: give saves more time",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG


@given(st.sampled_from(KEYS), st.data())
def test_every_misspelt_key_is_refused_with_the_right_one(key: str, data: st.DataObject) -> None:
    """Drop one letter of the last part of any key: the key itself is among what is offered."""
    section, _, leaf = key.rpartition(".")
    place = data.draw(st.integers(0, len(leaf) - 1))
    misspelt = f"{section}.{leaf[:place]}{leaf[place + 1 :]}"
    if misspelt in KEYS or len(leaf) < 4:
        return
    with pytest.raises(ConfigError) as caught:
        load_config([f"{misspelt}=1"])
    assert key in str(caught.value)


def test_a_printed_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(["model=llama_1m", "optim.lr=3e-4", "optim.decay=wsd", "run.name=x"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert read_config(path) == config
    assert read_config(path, ["optim.lr=1"]).optim.lr == 1
    with pytest.raises(ConfigError, match=r"optim.lrr: there is no such key"):
        read_config(path, ["optim.lrr=1"])
    path.write_text(path.read_text().replace("beta1", "beta"))
    with pytest.raises(ConfigError, match="beta"):
        read_config(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path / "nothing.yaml")


def test_a_warm_up_that_reaches_into_the_decay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reaches into the decay, the last 20 of loop\.steps=100"):
        load_config(["optim.decay=wsd", "optim.warmup_steps=90", "loop.steps=100"])


@pytest.mark.parametrize("group", ["model", "precision"])
def test_every_choice_fills_its_section(group: str) -> None:
    for choice in choices(group):
        config = load_config([f"{group}={choice}"])
        assert getattr(config, group).name == choice


@pytest.mark.parametrize("recipe", choices("recipe"))
def test_a_recipe_sets_what_belongs_together_and_leaves_the_last_word_to_the_user(recipe: str) -> None:
    assert load_config([f"recipe={recipe}", DATA]) != load_config([DATA])
    config = load_config([f"recipe={recipe}", DATA, "model=deepseek_7b", "optim.lr=5"])
    assert (config.model.name, config.optim.lr) == ("deepseek_7b", 5)


def test_defaults_stand_in_one_place() -> None:
    """The root file names choices and sets nothing, so that no default is written twice."""
    root = (Path(__file__).resolve().parents[2] / "configs/train.yaml").read_text()
    assert set(flatten_yaml(root)) == {"defaults"}


def test_every_number_has_bounds() -> None:
    """An unchecked one would reach the loop as it is."""
    config = load_config([])
    for section in ("loop", "optim", "data", "parallel", "checkpoint"):
        for field in dataclasses.fields(getattr(config, section)):
            if field.type not in (int, float):
                continue
            with pytest.raises(ConfigError):
                load_config([f"{section}.{field.name}=-3"])


def test_paths_mean_the_same_wherever_the_job_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["run.root=here", "data.prefix=there/tokens"])
    assert config.run.root == str(tmp_path / "here")
    assert config.data.prefix == str(tmp_path / "there/tokens")
