"""Errors in a config are reported before anything starts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from case_tables import cases
from penstock.config import (
    PRESETS,
    SECTIONS,
    Config,
    DataConfig,
    ModelConfig,
    check_config,
    keys_by_section,
)
from penstock.errors import ConfigError, FileError, UnknownNameError
from penstock.formats.config_toml import (
    apply_changes,
    dump_config,
    load_config,
    preset,
    read_config,
    start_from,
    with_absolute_paths,
)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_survives_a_round_trip(name):
    config = preset(name)
    assert check_config(config) is config
    assert load_config(dump_config(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_schedule_needs_no_numbers_beside_a_preset(name):
    config = check_config(apply_changes(preset(name), ["schedule.name=1f1b"]))
    schedule = config.schedule
    parallel = config.parallel
    assert parallel.pp * parallel.dp_replicate == (preset(name).parallel.devices or 4)
    assert schedule.microbatches >= parallel.pp
    assert (
        config.data.global_batch
        == config.rows * schedule.microbatches * parallel.dp_replicate
    )


def test_every_value_has_a_comment():
    text = dump_config(Config())
    values = sum(len(fields(getattr(Config(), section))) for section in SECTIONS)
    lines = [line for line in text.splitlines() if " = " in line]
    assert len(lines) == values + 1  # preset
    assert all("# " in line for line in lines)


@given(st.text(max_size=20), st.lists(st.text(max_size=8), max_size=3))
@settings(max_examples=50)
def test_any_string_survives_a_round_trip(folder, sources):
    # That is a place at home.
    assume(not any(text.startswith("~/") for text in (folder, *sources)))
    config = replace(
        Config(),
        model=replace(ModelConfig(), path=folder),
        data=replace(DataConfig(), sources=tuple(sources)),
    )
    assert load_config(dump_config(config)) == config


def test_missing_values_come_from_the_preset():
    config = load_config('preset = "gpt2"\n[run]\nsteps = 7\n')
    assert config == replace(PRESETS["gpt2"], run=replace(PRESETS["gpt2"].run, steps=7))


def test_set_changes_values_of_every_type():
    changes = [
        "model.layers=24",
        "schedule.name=hanayo",
        "optimizer.lr=1",
        "run.recompute=full",
        'data.sources=["a", "b"]',
        "schedule.partition=[4, 4]",
        "data.tokenizer=some/tokenizer.json",
    ]
    config = apply_changes(Config(), changes)
    assert (config.model.layers, config.optimizer.lr) == (24, 1.0)
    assert (config.schedule.name, config.schedule.partition) == ("hanayo", (4, 4))
    assert config.run.recompute == "full"
    assert config.data.sources == ("a", "b")
    assert config.data.tokenizer == "some/tokenizer.json"


WRONG = cases(r"""
[model]\nlayer = 3
    =>  config.toml:2:1: [model] has no key 'layer'\n\n  2 | layer = 3\n      ^^^^^\n  did you mean 'layers'?
[modell]\nlayers = 3
    =>  config.toml:1:1: a config has no section 'modell'\n\n  1 | [modell]\n      ^^^^^^^^\n  did you mean 'model'?
model = 3  =>  model is a section
preset = 3  =>  preset must be a name in quotes
[model]\nlayers = "3"  =>  model.layers must be a whole number, not '3'
[model]\ntie_embeddings = 1  =>  model.tie_embeddings must be true or false
[run]\nsteps = 0  =>  run.steps = 0 must be at least 1
[optimizer]\nlr = -1.0  =>  optimizer.lr = -1 must be at least 0
[optimizer]\nlr = inf  =>  optimizer.lr = inf must be a finite number
[optimizer]\nlr_schedule = "cosine:min=2"  =>  cosine:min=2: min must be from 0 to 1
[model]\nfamily = "lama"  =>  there is no model.family 'lama'; did you mean 'llama'?
[data]\nsources = [1]  =>  data.sources must be a list of strings
[data]\nglobal_batch = 12\n[schedule]\nname = "1f1b"\nmicrobatches = 8
    =>  data.global_batch = 12 is not divisible by 8
[schedule]\npartition = [1, 2]  =>  schedule.partition has 3 layers, but model.layers = 8
[schedule]\nname = "1f1b"\n[parallel]\npp = 8\ndevices = 4  =>  devices = 4, but 1f1b needs 8
[run]\ncuda_graphs = true\n[data]\ndocument_mask = true  =>  data.document_mask = true: documents differ
[run]\ncuda_graphs = true\n[parallel]\ndp_shard = 2  =>  run.cuda_graphs = true does not go with parallel.dp_shard = 2
[run]\ncuda_graphs = true\ndevice = "cpu"  =>  run.cuda_graphs = true does not go with run.device = cpu
[run]\ncompile = true\n[parallel]\ndp_shard = 2  =>  run.compile = true does not go with parallel.dp_shard = 2
[run]\ncompile = "yes"  =>  there is no run.compile 'yes'
""")
HUGE = [
    (f"[run]\nsteps = {10**400}", "must be between -2^63 and 2^63"),
    (f"[optimizer]\nlr = {10**400}", "optimizer.lr = inf must be a finite number"),
]


@pytest.mark.parametrize(("text", "words"), [*WRONG, *HUGE])
def test_a_wrong_value_is_named_with_the_right_type_or_range(text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    assert words in str(caught.value)


def test_one_error_has_all_wrong_values():
    with pytest.raises(ConfigError) as caught:
        load_config("[run]\nsteps = 0\nkeep_checkpoints = 0\n[model]\nhidden_size = 0")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "change",
    ["model.layers", "layers=3", "modle.layers=3", "model.layrs=3", "model.layers=x"],
)
def test_the_error_for_a_wrong_set_quotes_it(change):
    with pytest.raises(ConfigError, match="--set"):
        apply_changes(Config(), [change])


def test_a_config_that_cannot_be_read_is_an_error_with_advice(tmp_path):
    with pytest.raises(FileError, match="penstock init"):
        read_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(FileError, match="UTF-8"):
        read_config(broken)
    with pytest.raises(FileError, match="this is not TOML"):
        load_config("[model\n")
    with pytest.raises(UnknownNameError, match="llama-1b"):
        preset("llama-1bb")


def test_absolute_paths_work_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = (
        'data.sources=["text", "~/more.txt"]',
        "data.tokenizer=words.json",
        "schedule.name=plan.json",
        "model.path=w",
    )
    found = with_absolute_paths(apply_changes(Config(), changes))
    assert found.data.sources == (str(tmp_path / "text"), str(Path.home() / "more.txt"))
    assert found.data.tokenizer == str(tmp_path / "words.json")
    assert found.schedule.name == str(tmp_path / "plan.json")
    assert found.model.weights == str(tmp_path / "w")
    assert with_absolute_paths(Config()) == Config()
    assert with_absolute_paths(found) == found


def test_a_path_in_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    changes = ["run.folder=~/run", "data.sources=[~/a, b]", "run.precision=~bfloat16"]
    config = apply_changes(Config(), changes)
    assert config.run.folder == "/home/me/run"
    assert config.data.sources == ("/home/me/a", "b")
    assert config.run.precision == "~bfloat16"


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "[run]\nsteps = " + "1" * 5000])
def test_too_deep_nesting_and_too_many_digits_are_not_toml(text):
    with pytest.raises(FileError, match="this is not TOML"):
        load_config(text)


def test_a_switch_may_be_written_with_and_without_quotes():
    for text, value in (("true", "true"), ("false", "false"), ('"auto"', "auto")):
        config = load_config(f"[run]\ncompile = {text}")
        assert config.run.compile == value
        assert load_config(dump_config(config)).run.compile == value
    assert load_config("", changes=["run.compile=true"]).run.compile == "true"


def test_a_short_config_has_the_usual_settings_and_is_equal_to_the_whole_one():
    for name in PRESETS:
        config = preset(name)
        text = dump_config(config, short=True)
        assert load_config(text) == config
        assert len([line for line in text.splitlines() if " = " in line]) == 20
    changed = apply_changes(preset("gpt2"), ["run.seed=7"])
    text = dump_config(changed, short=True)
    assert "seed = 7" in text
    assert load_config(text) == changed


def test_a_config_that_starts_from_a_folder_has_its_path_in_place_of_sizes(tmp_path):
    text = dump_config(start_from(str(tmp_path)), short=True)
    assert f"path = {str(tmp_path)!r}".replace("'", '"') in text
    assert "rank = 0" in text
    assert "layers =" not in text
    assert load_config(text).model.weights == str(tmp_path)
    with pytest.raises(UnknownNameError, match="there is no preset 'gpt3'"):
        start_from("gpt3")


def test_there_are_no_more_settings_than_a_reader_can_take_in():
    assert sum(map(len, keys_by_section().values())) <= 65
