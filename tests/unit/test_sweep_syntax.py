"""Which combinations a sweep's command line names, how their folders are called, and how they are composed."""

import copy
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from configs.compose import choices, load, to_yaml
from configs.sweep import Composer, folder_names, parse_sweep, read_lines, short_keys
from contract.errors import ConfigError
from train.config import TrainConfig, load_config

DEFAULTS = load_config([])
SOME_LR = st.lists(st.sampled_from(["1e-4", "3e-4", "0.001", "1e-2"]), min_size=2, max_size=4, unique=True)


def combinations(*overrides: str, lines: list[str] | None = None) -> list[list[str]]:
    return parse_sweep(overrides, TrainConfig, lines or []).combinations


@pytest.mark.req("C12")
@pytest.mark.parametrize(
    ("override", "settings"),
    [
        ("seed=1,2", ["seed=1", "seed=2"]),
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=choice(5,7)", ["seed=5", "seed=7"]),
        ("seed=sort(3,1,2)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=sort(range(1,4),reverse=true)", ["seed=3", "seed=2", "seed=1"]),
        ("optim.lr=1e-4,0.0001,1e-3", ["optim.lr=0.0001", "optim.lr=0.001"]),
        ("model=glob(llama_1*)", ["model=llama_125m", "model=llama_1b", "model=llama_1m"]),
        ("model=glob(*,exclude=[llama*,gpt*])", ["model=deepseek_67b", "model=deepseek_7b"]),
        ("run.init_from='a, b','c d'", ["run.init_from='a, b'", "run.init_from='c d'"]),
        ("seed=choice(3)", ["seed=3"]),
        ("optim={lr:1},{lr:2,eps:1e-6}", ["optim={lr:1}", "optim={lr:2,eps:1e-06}"]),
        ("monitor.peak_tflops=null,312", ["monitor.peak_tflops=null", "monitor.peak_tflops=312"]),
    ],
)
def test_values_of_one_key(override: str, settings: list[str]) -> None:
    assert combinations(override) == [[setting] for setting in settings]


@pytest.mark.req("C12")
def test_shuffled_values_are_the_same_values() -> None:
    assert sorted(combinations("seed=shuffle(range(1,9))")) == [[f"seed={seed}"] for seed in range(1, 9)]


@pytest.mark.req("C12")
@given(lrs=SOME_LR, seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True))
def test_products_come_in_the_order_of_hydras_own_sweeper(lrs: list[str], seeds: list[int]) -> None:
    overrides = [f"optim.lr={','.join(lrs)}", "loop.steps=7", f"seed=choice({','.join(map(str, seeds))})"]
    (reference,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(overrides), None)
    sweep = parse_sweep(overrides, TrainConfig, swept=["seed"])
    assert sweep.base == ["loop.steps=7"]
    assert [[one[0], "loop.steps=7", one[1]] for one in sweep.combinations] == reference


@pytest.mark.req("C12")
def test_a_file_has_a_set_a_line_that_may_sweep_itself() -> None:
    lines = read_lines("# the good ones\noptim.lr=1e-3 model.dim=64\n\noptim.lr=1e-4,1e-3 model.dim=64\n")
    sweep = parse_sweep(["seed=1,2", "loop.steps=9"], TrainConfig, lines)
    assert (sweep.base, sweep.keys) == (["loop.steps=9"], ["seed", "optim.lr", "model.dim"])
    # The first line comes again in the second: it is one combination.
    assert [one for one in sweep.combinations if one[0] == "seed=1"] == [
        ["seed=1", "optim.lr=1e-3", "model.dim=64"],
        ["seed=1", "optim.lr=0.0001", "model.dim=64"],
        ["seed=1", "optim.lr=0.001", "model.dim=64"],
    ]


@pytest.mark.req("C12")
@pytest.mark.parametrize(
    ("overrides", "lines", "sentence"),
    [
        (["optim.lr=interval(0,1)"], [], "an interval has no end of values"),
        (["optim.lrr=1,2"], [], "optim.lrr: there is no such key, did you mean optim.lr"),
        (["model=llama_3m,llama_4m"], [], "model=llama_4m: there is no such model"),
        (["model=glob(none*)"], [], "matches no model, there are: deepseek"),
        (["optim.lr=glob(*)"], [], "glob() chooses files of a group"),
        (["seed=1,2", "seed=3"], [], "seed is set twice"),
        (["seed=1,2"], ["seed=3"], "seed is set in the file and on the command line"),
        (["seed=range(1"], [], "cannot be read"),
        (["seed=range(3,3)"], [], "names no value"),
        (["seed=range(1,100000000)"], [], "more than 10,000 combinations"),
        (["seed=shuffle(range(1,100000000))"], [], "more than 10,000 combinations"),
        (["seed=range(0,200)", "loop.steps=range(1,200)"], [], "more than 10,000 combinations"),
        (["seed=range(1,9,0)"], [], "a range with the step 0 has no end"),
        (
            ["seed=choice()"],
            [],
            "'seed=choice()' cannot be read (empty choice is not legal): write KEY=VALUE",
        ),
        (["seed=1,,2"], [], "'seed=1,,2' cannot be read: write KEY=VALUE"),
        (["run.init_from=ü,b"], [], "unusual characters go in quotes of their own"),
        (["+optim.x=1,2"], [], "keys cannot be added"),
        ([], ["optim.lr='1"], "write it as on a command line"),
    ],
)
def test_what_no_sweep_can_do_is_one_sentence(overrides: list[str], lines: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_sweep(overrides, TrainConfig, lines)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.req("C12")
@settings(max_examples=12, phases=[Phase.generate])  # a composition takes 0.1 s
@given(
    lr=st.floats(1e-6, 1e-1),
    seed=st.integers(0, 10**6),
    model=st.sampled_from(choices("model")),
    prefix=st.sampled_from(["a b", "1e5", "x=1", "null", "0x1f", "1:30", "yes", "ä"]),
)
def test_a_task_is_composed_as_a_run_of_its_own(lr: float, seed: int, model: str, prefix: str) -> None:
    base = ["loop.steps=7", "optim.decay=constant"]
    task = [f"optim.lr={lr}", f"model={model}", f"seed={seed}", f"data.prefix='{prefix}'"]
    composer = Composer("train", TrainConfig, base)
    composer.compose([f"model={model}", "optim.warmup_steps=3"])  # leaves nothing behind
    config = composer.compose(task)
    reference = load_config([*base, *task])
    assert config.data.prefix == prefix
    config.data.prefix, config.run.root = reference.data.prefix, reference.run.root
    assert config == reference
    assert composer.choices(task)["model"] == model


@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="$\\"))
    | st.sampled_from(
        ["1e5", "1_0", "0x1f", "0o7", "1:30", "yes", "null", "~", ".nan", "- a", "a: b", "#", ""]
    )
)
def test_what_is_printed_is_read_back(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = copy.deepcopy(DEFAULTS)
    config.data.prefix, config.monitor.peak_tflops, config.optim.lr = text, None, 1e-7
    path = tmp_path_factory.mktemp("printed") / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path, TrainConfig) == config


def test_a_saved_configuration_takes_a_time_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config([])))
    assert load(path, TrainConfig, ["data.prefix=12:00:00"]).data.prefix == "12:00:00"


@pytest.mark.req("C12")
def test_folder_names_are_readable_safe_and_unique() -> None:
    keys = ["optim.lr", "data.prefix", "run.init_from"]
    paths = [["optim.lr=0.0001", "data.prefix=/a/b c", "run.init_from='x'"]]
    paths += [["optim.lr=0.0001", "data.prefix=/d/b c", "run.init_from='x'"]]
    first, second = folder_names(paths, keys)
    assert first != second and first.startswith("lr=0.0001_prefix=b-c_init_from=x-")
    assert folder_names(paths[1:], keys) == [second]  # whatever else there is
    assert folder_names([["seed=1", "model=llama_3m"]], ["seed", "model"]) == ["seed=1_model=llama_3m"]
    (long,) = folder_names([["data.prefix=" + "x" * 300]], ["data.prefix"])
    assert len(long) <= 100
    assert short_keys(["a.lr", "b.lr", "seed"]) == {"a.lr": "a.lr", "b.lr": "b.lr", "seed": "seed"}


@given(
    values=st.lists(st.text(st.characters(codec="ascii"), max_size=130), min_size=2, max_size=20, unique=True)
)
def test_no_two_tasks_share_a_folder(values: list[str]) -> None:
    names = folder_names([[f"data.prefix={value}"] for value in values], ["data.prefix"])
    assert len(set(names)) == len(values)
    assert all("/" not in name and not name.startswith(".") and len(name) <= 100 for name in names)
