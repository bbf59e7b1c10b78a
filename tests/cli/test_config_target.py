"""What `epserve serve` is pointed at, and what the command line says of the configuration's keys."""

import subprocess
import sys

import pytest
import yaml

from epserve.cli import config_reference, config_target
from epserve.config import load_config, parse_config
from epserve.errors import ConfigError
from epserve.models.demo import write_demo_checkpoint


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(config_target, "_num_gpus", lambda: 0)
    write_demo_checkpoint("mixtral", tmp_path / "mixtral")
    return tmp_path / "mixtral"


def test_a_folder_of_a_model_is_served_with_defaults(model):
    config, from_defaults = config_target.load_target(str(model), {"server.port": 0})
    assert from_defaults
    assert config.model.path == model
    assert (config.engine.ranks, config.server.port) == (1, 0)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 1), (1, 1), (8, 8)])
def test_there_is_a_rank_for_each_gpu(model, monkeypatch, gpus, ranks):
    monkeypatch.setattr(config_target, "_num_gpus", lambda: gpus)
    assert config_target.load_target(str(model))[0].engine.ranks == ranks
    assert config_target.load_target(str(model), {"engine.ranks": 3})[0].engine.ranks == 3


def test_a_saved_configuration_means_the_same(model, tmp_path):
    config, _ = config_target.load_target(str(model), {"engine.cuda_graph_tokens": [1, 8], "server.metrics_port": 0})
    saved = tmp_path / "saved.yaml"
    saved.write_text(config_reference.dump(config))
    assert load_config(saved) == config
    assert config_target.load_target(str(saved)) == (config, False)


def test_a_configuration_file_is_read_as_before(model, tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}, "engine": {"ranks": 2}}))
    config, from_defaults = config_target.load_target(str(tmp_path / "c.yaml"), {"server.port": 1})
    assert (config.engine.ranks, config.server.port, from_defaults) == (2, 1, False)


def test_a_downloaded_model_is_found_by_its_name(model, tmp_path, monkeypatch):
    import huggingface_hub

    folder = tmp_path / "hub" / "models--some--moe"
    (folder / "snapshots").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    model.rename(folder / "snapshots" / ("a" * 40))
    whole = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: whole(name, cache_dir=tmp_path / "hub", **how)
    )
    config, _ = config_target.load_target("some/moe")
    assert (config.model.path / "config.json").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nosuch/moe", r"hf download nosuch/moe --local-dir moe, then epserve serve moe"),
        ("nosuch.yaml", "configuration file nosuch.yaml does not exist"),
        ("empty", "empty holds no config.json"),
        ("empty/model.safetensors", "name the folder that holds it and config.json"),
    ],
)
def test_what_is_no_model_and_no_file_is_told_in_one_line(tmp_path, monkeypatch, target, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=words) as error:
        config_target.load_target(target)
    assert "\n" not in str(error.value)


def test_every_key_is_explained_in_a_users_words():
    for entry in config_reference.entries():
        for strange in ("Literal", "Annotated", "tuple", "NoneType", "Union", "class"):
            assert strange not in entry.kind, entry
        if entry.default != "required":
            section, _, key = entry.key.partition(".")
            data = {"model": {"path": "."}}
            data.setdefault(section, {})[key] = yaml.safe_load(entry.default)
            assert parse_config(data) == parse_config({"model": {"path": "."}}), entry


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("engine.ranks", ["whole number, at least 1 and at most 1024, default 1", "Expert-parallel ranks"]),
        ("engine.combine_order", ["one of rank, slot"]),
        ("server", ["server.port:", "server.tokens_file: path or null"]),
    ],
)
def test_explain_names_values_default_and_meaning(key, words):
    text = config_reference.explain(key)
    assert all(each in text for each in words)


def test_explain_of_a_key_that_is_not_there_suggests_one():
    with pytest.raises(ConfigError, match=r"'ranks' is no key.*did you mean 'engine\.ranks'"):
        config_reference.explain("ranks")


def test_a_wrong_value_leads_to_its_explanation():
    with pytest.raises(ConfigError, match=r"epserve config --explain engine\.ranks"):
        parse_config({"model": {"path": "."}, "engine": {"ranks": 0}})


def test_the_command_prints_what_a_model_would_be_served_with(model):
    done = subprocess.run(
        [sys.executable, "-m", "epserve", "config", str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed.keys() == {"model", "engine", "cluster", "scheduler", "server"}
    assert printed["model"]["path"] == str(model)


def test_an_override_below_a_value_is_told_for_a_model_as_for_a_file(model):
    with pytest.raises(ConfigError, match=r"model\.path\.x: path is .*, which is no section"):
        config_target.load_target(str(model), {"model.path.x": 1})
