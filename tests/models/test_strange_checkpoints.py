"""Checkpoints from strangers: whatever the files hold, opening them ends soon, in one line that says what is wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epserve.errors import CheckpointError, OperatorError
from epserve.models import UnchangedCheckpoint, open_checkpoint
from epserve.models.info import check_config
from epserve.models.tensors import read_header
from tests.support.checkpoints import edit_config, write

pytestmark = pytest.mark.timeout(120)
SOON_S = 10.0
"""For what takes milliseconds on a quiet machine. It took 26 s, or for ever."""
NASTY: tuple[Any, ...] = (
    [], {}, "x", "a\nb", -1, 0, 10**9, 10**30, 1.5, float("nan"), True, [1, [2]], ["silu"], {"a": 1},
)  # fmt: skip


def refused(folder: Path, opened: Callable[..., Any] = open_checkpoint) -> str:
    start = time.monotonic()
    with pytest.raises(CheckpointError) as told:
        opened(folder)
    assert time.monotonic() - start < SOON_S
    text = str(told.value)
    assert "\n" not in text and len(text) < 1000, text
    return text


@pytest.fixture
def folder(tmp_path) -> Path:
    return write("mixtral", tmp_path / "model")


@pytest.fixture(scope="module")
def generic(tmp_path_factory) -> Path:
    """Of a family without a table of ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("generic") / "phimoe"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("phimoe", **sizes, **experts)).save_pretrained(path)
    open_checkpoint(path)
    return path


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size", "num_experts_per_tok"]
)
@pytest.mark.parametrize("value", [10**9, 10**30])
def test_a_size_that_no_model_has_costs_neither_time_nor_memory(folder, key, value):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = refused(edit_config(folder, **{key: value}))
    assert f"{key}" in text.replace("top_k", "num_experts_per_tok") and str(value) in text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts", "hidden_size"])
def test_a_size_that_no_model_has_is_not_built_by_transformers_either(generic, key):
    config = (generic / "config.json").read_text()
    try:
        assert f"{key} is 1000000000, at most" in refused(edit_config(generic, **{key: 10**9}))
    finally:
        (generic / "config.json").write_text(config)


STRANGE: dict[str, tuple[dict, str]] = {
    "labels": ({"num_labels": 10**8}, "num_labels is 100000000, at most 131072 can be served"),
    "layers of an encoder": ({"encoder_layers": 10**8}, "encoder_layers is 100000000, at most 1024 can be served"),
    "a list": ({"deepstack_indexes": list(range(100_000))}, "deepstack_indexes has 100000 items, at most 1024"),
    "within": ({"vision_config": {"depth": 10**8}}, "depth is 100000000, at most 1024 can be served"),
    "within a list": ({"parts": [{"blocks": 10**8}]}, "blocks is 100000000, at most 1024 can be served"),
    "a size in a list": ({"hidden_sizes": [64, 10**9]}, "hidden_sizes is 1000000000, at most 16777216 can be served"),
    "a word that is not known": ({"frobs": -(10**8)}, "frobs is -100000000, at most 131072 can be served"),
    "a name of two lines": ({"a\nb": 10**8}, r"'a\nb' is 100000000, at most 131072"),
    "architectures": ({"architectures": 5}, "architectures must be a list of names, got 5"),
    "names of architectures": ({"architectures": ["A", 5]}, "architectures must be a list of names, got ['A', 5]"),
}


@pytest.mark.parametrize("family", ["mixtral", "generic"])
@pytest.mark.parametrize("case", STRANGE)
def test_no_integer_and_no_list_is_larger_than_a_model_can_have(family, case, folder, generic, tmp_path):
    values, message = STRANGE[case]
    copy = tmp_path / "copy"
    shutil.copytree(generic if family == "generic" else folder, copy)
    assert message in refused(edit_config(copy, **values))


def test_a_configuration_of_many_megabytes_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"a": "b" * (17 << 20)}))
    assert "config.json cannot be read: it has more than 16777216 bytes" in refused(folder)


def test_transformers_stops_building_when_a_model_has_too_many_modules(generic, monkeypatch):
    monkeypatch.setattr("epserve.models.generic.MAX_MODULES", 20)
    assert "it has more than 20 modules" in refused(generic)


@pytest.mark.parametrize("families", ["gemma3n_text", pytest.param("all", marks=pytest.mark.slow)])
def test_no_family_of_transformers_has_sizes_that_are_refused(families):
    """Some have large numbers under keys that sound alike, such as vocab_size_per_layer_input."""
    from transformers import CONFIG_MAPPING

    checked = 0
    for name in CONFIG_MAPPING if families == "all" else [families]:
        try:
            config = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
        except Exception:  # has no defaults, or wants a package
            continue
        check_config(config, name)
        checked += 1
    assert checked > (200 if families == "all" else 0)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe", "generic"])
def test_any_value_of_any_key_is_served_or_refused_in_one_line(family, tmp_path, request):
    """A type that is not the key's ended in an AttributeError, a TypeError or a truth of its own."""
    folder = request.getfixturevalue("generic") if family == "generic" else write(family, tmp_path / "model")
    path = folder / "config.json"
    good = json.loads(path.read_text())
    more = ("quantization_config", "hidden_act", "n_group", "mlp_only_layers", "swiglu_limit", "text_config", "dtype")
    start = time.monotonic()
    told = []
    try:
        for key in dict.fromkeys((*good, *more)):
            for value in NASTY if family != "generic" or "num" in key or key in more else NASTY[:6]:
                path.write_text(json.dumps(good | {key: value}))
                try:
                    open_checkpoint(folder)
                except OperatorError as error:
                    told.append(str(error))
                except Exception as error:
                    error.add_note(f"{key} {value!r}")
                    raise
    finally:
        path.write_text(json.dumps(good))
    assert len(told) > 50 and not [text for text in told if "\n" in text]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_topk_prob", "false", "norm_topk_prob must be true or false, got 'false'"),
        ("routed_scaling_factor", float("inf"), "routed_scaling_factor must be a finite number, got inf"),
        ("n_group", 1.5, "n_group must be an integer, got 1.5"),
        ("quantization_config", "fp8", "quantization_config must be an object, got 'fp8'"),
    ],
)
def test_a_value_of_another_type_is_not_taken_for_a_truth(tmp_path, key, value, message):
    assert message in refused(edit_config(write("deepseek_v3", tmp_path), **{key: value}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("opened", [open_checkpoint, UnchangedCheckpoint])
def test_nested_json_is_refused(folder, name, opened):
    text = b'{"a": ' + 100_000 * b"[" + 100_000 * b"]" + b"}"
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes((struct.pack("<Q", len(text)) if name == "model.safetensors" else b"") + text)
    assert f"{name}" in (told := refused(folder, opened)) and "nested too deeply" in told


def test_json_that_only_some_readers_can_walk_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config)[:-1] + ', "a": ' + 300 * "[" + 300 * "]" + "}")
    assert "config.json cannot be read: its JSON is nested more than 64 deep" in refused(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "shard"])
@pytest.mark.parametrize(("kind", "make"), [("a pipe", os.mkfifo), ("a device", None), ("a folder", os.mkdir)])
@pytest.mark.parametrize("opened", [open_checkpoint, UnchangedCheckpoint])
def test_what_is_no_regular_file_is_not_waited_for(folder, name, kind, make, opened):
    if name in ("shard", "model.safetensors.index.json"):
        (folder / "model.safetensors").unlink()
    if name == "shard":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard"}}))
    path = folder / name
    path.unlink(missing_ok=True)
    if make is None:
        path.symlink_to("/dev/zero")
    else:
        make(path)
    assert f"{path} is {kind}; a regular file is needed" in refused(folder, opened)


Header = dict[str, Any]
GOOD: Header = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
}


def with_b(**keys: Any) -> Header:
    return GOOD | {"b": GOOD["b"] | keys}


HEADERS: dict[str, tuple[Header | bytes, str]] = {
    "overlap": (with_b(data_offsets=[8, 24]), "tensor b: data_offsets begin at 8, but tensor a ends at 16: it overlaps"),
    "the same bytes": (with_b(data_offsets=[0, 16]), "tensor b: data_offsets begin at 0, but tensor a ends at 16"),
    "gap": (with_b(data_offsets=[20, 36]), "tensor b: data_offsets begin at 20, but tensor a ends at 16: it leaves a gap"),
    "gap at the start": ({"b": GOOD["b"]}, "tensor b: data_offsets begin at 16, but the data begins at 0"),
    "negative": (with_b(data_offsets=[-16, 0]), "tensor b: data_offsets [-16, 0], must be two integers from 0 up"),
    "backwards": (with_b(data_offsets=[32, 16]), "tensor b: data_offsets [32, 16], must be"),
    "offsets of floats": (with_b(data_offsets=[16.0, 32.0]), "tensor b: data_offsets [16.0, 32.0], must be"),
    "three offsets": (with_b(data_offsets=[16, 24, 32]), "tensor b: data_offsets [16, 24, 32], must be"),
    "no offsets": ({"b": {"dtype": "F32", "shape": [4]}}, "tensor b: data_offsets None, must be"),
    "enormous": (with_b(data_offsets=[16, 10**30]), "tensor b: data_offsets [16, 1"),
    "shape of floats": (with_b(shape=[4.0]), "tensor b: shape [4.0], must be a list of at most 64 integers from 0 up"),
    "negative shape": (with_b(shape=[-2, -2]), "tensor b: shape [-2, -2], must be"),
    "shape of switches": (with_b(shape=[True, 4]), "tensor b: shape [True, 4], must be"),
    "no shape": (with_b(shape="4"), "tensor b: shape '4', must be"),
    "many dimensions": (with_b(shape=[4] + 100_000 * [1]), "tensor b: shape [4, 1, 1"),
    "other size": (with_b(shape=[5]), "tensor b F32 (5,) cannot have 16 bytes"),
    "dtype": (with_b(dtype=["F32"]), "tensor b: dtype ['F32'], must be a string"),
    "entry": (GOOD | {"b": 5}, "tensor b: entry 5, must be an object"),
    "no object": (b"[1, 2]", "its header is no JSON object"),
    "a name twice": (
        b"{" + b", ".join(2 * [b'"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}']) + b"}",
        "it has the key 'a' twice",
    ),
    "a name of two lines": ({"a\nb": GOOD["b"]}, r"tensor 'a\nb': data_offsets begin at 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_is_held_to_what_the_safetensors_library_holds_it_to(tmp_path, case):
    header, message = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    told = refused(path, read_header)
    assert message in told and str(path) in told


def test_a_good_header_is_read_and_its_order_does_not_matter(tmp_path):
    path = tmp_path / "model.safetensors"
    empty = {"c": {"dtype": "F32", "shape": [0, 3], "data_offsets": [16, 16]}}
    text = json.dumps({"b": GOOD["b"], "__metadata__": {"format": "pt"}, "a": GOOD["a"], **empty}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    found = read_header(path)
    assert list(found) == ["a", "c", "b"] and found["b"].offset == 8 + len(text) + 16


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (100_000_001, "a header of 100000001 bytes, at most 100000000 are allowed"),
        (99_999_999, "too short for a header"),
    ],
)
def test_the_length_of_a_header_is_bounded_before_it_is_read(tmp_path, length, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length))
    if length > 100_000_000:
        os.truncate(path, length + 100)  # sparse
    assert message in refused(path, read_header)
