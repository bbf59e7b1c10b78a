"""Which transformers families epserve serves, found out by doing it: makes docs/coverage.md.

For each family a tiny random checkpoint is written by transformers itself, opened by the service's own loader, run through
the modular kernel, and generated from with remote experts; a model with local experts says what is right.

    python -m tests.models.coverage_table            write docs/coverage.md
    python -m tests.models.coverage_table mixtral    print these rows
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import epserve.transformers
from epserve.config import parse_config
from epserve.errors import EpserveError
from epserve.models import open_checkpoint
from epserve.models.expert_modules import find_layers
from epserve.models.generic import open_generic
from epserve.models.tensors import read_json
from epserve.modular_kernel import RankContext, check_routing
from epserve.protocol.served_model import model_reply
from epserve.rank.step import StepPlan, split_gradients
from epserve.rank.worker import Worker

from . import stored_layouts
from .coverage_families import CASES, Case, architecture, families, tiny_config

PAGE = Path(__file__).parent.parent.parent / "docs" / "coverage.md"
LAYOUTS = ("fp8 blocks", "compressed fp8, channels", "compressed int8", "compressed int4", "compressed mxfp4",
           "compressed nvfp4", "gptq")  # fmt: skip
"""Rows of tests/models/stored_layouts.py: one for each form that kernels know, and each way to pack."""
TOLERANCE = 1e-5  # relative L2 error of a layer in float32
NEW_TOKENS, PROMPT = 32, (2, 7)  # greedy tokens; prompts and their length


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`error`: the largest of any layer. `reason`: of the first no."""

    family: str
    architecture: str
    loads: bool = False
    layer: bool = False
    generate: bool = False
    stored: tuple[str, ...] = ()
    """Of each of LAYOUTS: yes, no, or why it is not stored so."""
    error: float = float("nan")
    layers: int = 0
    activation: str = ""
    reason: str = ""
    seconds: float = 0.0


class InProcess:
    """One rank of the service behind the client's interface: its loader and its kernel, without Ray and gRPC."""

    def __init__(self, path: Path, *, max_tokens: int = 16, dtype: str = "auto"):
        self.max_tokens, self.calls = max_tokens, 0
        settings = {
            "model": {"path": str(path), "dtype": dtype},
            "engine": {"max_tokens_per_rank": max_tokens, "device": "cpu"},
        }
        self.worker = Worker(parse_config(settings), RankContext())
        self.worker.load()
        self.worker.warm_up()
        self.info = self.worker.info
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def model(self) -> Any:
        limits = SimpleNamespace(max_tokens_per_request=self.max_tokens, max_message_bytes=1 << 30)
        return model_reply(self.info, self.info.layers, limits)

    def forward(self, layer: int, hidden: Any, topk_ids: Any = None, topk_weights: Any = None) -> torch.Tensor:
        assert hidden.shape[0] <= self.max_tokens, "the client splits what is above the limit"
        self.calls += 1
        mode = "block" if topk_ids is None else "routed"
        plan = StepPlan(step=self.calls, layer=layer, mode=mode, tokens_per_rank=(hidden.shape[0],))
        if topk_ids is not None:
            assert topk_ids.shape[1] <= self.info.top_k
            routing = check_routing(topk_ids, topk_weights, num_tokens=len(hidden), num_experts=self.info.num_experts)
            topk_ids, topk_weights = routing.ids_Mt, routing.weights_Mt
        return self.worker.step(plan, hidden.to(self.info.dtype), topk_ids, topk_weights).to(hidden.dtype).clone()

    def backward(
        self, layer: int, hidden: Any, gradient: Any, topk_ids: Any = None, topk_weights: Any = None, *,
        not_finite_rows: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        assert hidden.shape[0] <= self.max_tokens, "the client splits what is above the limit"
        self.calls += 1
        mode = "block" if topk_ids is None else "routed"
        plan = StepPlan(step=self.calls, layer=layer, mode=mode, tokens_per_rank=(hidden.shape[0],), backward=True)
        x, g = hidden.to(self.info.dtype), gradient.to(self.info.dtype)
        ids = None if topk_ids is None else topk_ids.int().contiguous()
        # In a thread of its own, as a rank's is: torch calls operators with autograd switched off for this one.
        made = self._thread.submit(self.worker.step, plan, x, ids, topk_weights, g).result()
        dx, dw = (made, None) if ids is None else split_gradients(made, hidden.shape[1])
        return dx.to(hidden.dtype), dw

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        result = self.forward(*args, **kwargs)
        return SimpleNamespace(wait=lambda: result, drop=lambda: None)

    def close(self) -> None:
        self._thread.shutdown()
        self.worker.close()


def write_checkpoint(family: str, folder: Path, *, wide: bool = False) -> Path:
    """A model of random weights, saved by transformers. Experts are scaled so that they matter. wide: see `tiny_config`."""
    torch.manual_seed(7)
    model = architecture(family)(tiny_config(family, wide=wide)).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif ".experts." in name and name.endswith("_bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("post_expert_norm.weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def quantise_experts(path: Path, folder: Path) -> tuple[Path, Path]:
    """Two copies of a checkpoint: its experts in fp8 with a scale for each 128 x 128 block, and the same multiplied out."""
    tensors, found = load_file(path / "model.safetensors"), open_generic(path, read_json(path / "config.json"))
    fp8, floats = dict(tensors), dict(tensors)
    for name in found.weight_names():
        value = tensors[name]
        rows, columns = (-(-size // 128) * 128 for size in value.shape[-2:])
        padded = torch.nn.functional.pad(value, (0, columns - value.shape[-1], 0, rows - value.shape[-2]))
        blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
        scale = blocks.abs().amax(dim=(-3, -1)) / 448
        spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : value.shape[-2], : value.shape[-1]]
        fp8[name] = (value / spread).to(torch.float8_e4m3fn)
        fp8[name + "_scale_inv"] = scale
        floats[name] = fp8[name].float() * spread
    config = read_json(path / "config.json")
    quantised = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for name, values, settings in (("fp8", fp8, quantised), ("floats", floats, config)):
        (folder / name).mkdir()
        save_file({key: value.contiguous() for key, value in values.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(settings))
    return folder / "fp8", folder / "floats"


def _reads(row: stored_layouts.Row, path: Path, names: tuple[str, ...], folder: Path) -> str:
    """Experts in this layout, as a rank of the service loads them, mean what the tool says."""
    if row.name == "fp8 blocks":
        copies = quantise_experts(path, folder)
    elif not _one_an_expert(path, names):
        return "stacked"
    else:
        copies = _store(row, path, names, folder)
    held, wanted = (_held(copy) for copy in copies)
    for layer, (weights, quant) in held.items():
        meant, true = (stored_layouts.meaning(*each) for each in ((weights, quant), wanted[layer]))
        if not all(torch.equal(one, other) for one, other in zip(meant, true, strict=True)):
            return "no"
    return "yes"


def _one_an_expert(path: Path, names: tuple[str, ...]) -> bool:
    """Tools store the matrices of linear modules."""
    tensors = load_file(path / "model.safetensors")
    return all(name.endswith(".weight") and tensors[name].ndim == 2 for name in names)


def _held(path: Path) -> dict[int, Any]:
    """Of each layer, what one rank holds and its scheme."""
    settings = {"model": {"path": str(path)}, "engine": {"device": "cpu"}}
    worker = Worker(parse_config(settings), RankContext())
    worker.load()
    return {layer: (worker.weights.held(layer)[2].experts, quant) for layer, quant in worker.plan.served.items()}


def _store(row: stored_layouts.Row, path: Path, names: tuple[str, ...], folder: Path) -> tuple[Path, Path]:
    """The checkpoint with these matrices in the row's layout, and with what they mean."""
    tensors, config = load_file(path / "model.safetensors"), read_json(path / "config.json")
    stored, means = dict(tensors), dict(tensors)
    for number, name in enumerate(names):
        made, means[name] = row.store(tensors[name], number)
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{suffix}": each for suffix, each in made.items()}
    for kind, values, settings in (
        ("stored", stored, config | {"quantization_config": row.settings}),
        ("means", means, config),
    ):
        (folder / kind).mkdir()
        save_file({key: value.contiguous() for key, value in values.items()}, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(settings))
    return folder / "stored", folder / "means"


def _stored(family: str, folder: Path) -> tuple[str, ...]:
    path = write_checkpoint(family, folder / "wide", wide=True)
    names = open_generic(path, read_json(path / "config.json")).weight_names()
    found = []
    for number, name in enumerate(LAYOUTS):
        (place := folder / f"layout-{number}").mkdir()
        found.append(_reads(stored_layouts.BY_NAME[name], path, names, place))
    return tuple(found)


def evaluate(family: str) -> Row:
    """One row. Whatever fails says so in it; nothing is raised."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    for name in ("transformers", "epserve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    facts: dict[str, Any] = {"family": family, "architecture": architecture(family).__name__}
    with tempfile.TemporaryDirectory(prefix="epserve-coverage-") as folder, torch.no_grad():
        try:
            _fill(facts, family, Path(folder))
        except EpserveError as error:
            facts["reason"] = str(error).replace(folder, "the checkpoint")
        except Exception as error:  # a row for every family: one that cannot even be built says why
            facts["reason"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Row(**facts, seconds=time.perf_counter() - start)


def _fill(facts: dict[str, Any], family: str, folder: Path) -> None:
    path, cls = write_checkpoint(family, folder), architecture(family)
    local = cls.from_pretrained(path, experts_implementation="eager")
    served = InProcess(path)
    layers = find_layers(local)
    facts |= {"loads": True, "layers": len(layers), "activation": served.info.activation.kind}
    facts["stored"] = _stored(family, folder)
    prompt = torch.randint(3, 89, PROMPT, generator=torch.Generator().manual_seed(3))
    facts["error"] = _layer_error(local, layers, served, prompt)
    facts["layer"] = facts["error"] <= TOLERANCE
    if not facts["layer"]:
        facts["reason"] = f"a layer is off by {facts['error']:.1e}"
        return
    with epserve.transformers.connect(served):
        remote = cls.from_pretrained(path, experts_implementation="epserve")
        assert not _remote_parameters(remote)
        if case_of(family).generates:
            facts["reason"] = case_of(family).generates
            return
        served.calls = 0
        tokens = [_greedy(model, prompt) for model in (local, remote)]
    assert served.calls >= NEW_TOKENS * len(layers) or family == "diffusion_gemma", "the service was not asked"
    facts["generate"] = bool(torch.equal(*tokens))
    if not facts["generate"]:
        facts["reason"] = f"tokens differ from number {_first_difference(*tokens)}"


def case_of(family: str) -> Case:
    return CASES.get(family, Case())


def _remote_parameters(model: Any) -> list[str]:
    """Weights that remote experts modules hold; at least one module must be remote."""
    bound = {name: getattr(module, epserve.transformers.BINDING, None) for name, module in model.named_modules()}
    remote = [name for name, binding in bound.items() if binding is not None and binding.service is not None]
    assert remote, "no module is remote"
    return [f"{name}.{key}" for name in remote for key, _ in model.get_submodule(name).named_parameters()]


def _layer_error(model: Any, layers: Any, served: InProcess, prompt: torch.Tensor) -> float:
    """The largest relative L2 error over all calls of all experts modules in one forward pass."""
    seen: list[tuple[int, tuple, torch.Tensor]] = []
    for layer in layers:
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, number=layer.layer: seen.append((number, (*args, *kwargs.values()), out)),
            with_kwargs=True,
        )
    model(input_ids=prompt)
    for layer in layers:
        layer.module._forward_hooks.clear()
    assert {number for number, _, _ in seen} == set(served.info.layers), "a layer was not reached"
    worst = 0.0
    for number, (hidden, ids, weights, *_), out in seen:
        ids = torch.where(ids < served.info.num_experts, ids, -1).int()
        x_MK = hidden.reshape(-1, hidden.shape[-1])
        y_MK = torch.cat(
            [
                served.forward(number, x, i, w.float())
                for x, i, w in zip(*(value.split(served.max_tokens) for value in (x_MK, ids, weights)), strict=True)
            ]
        )
        assert out.norm() > 0, "an experts module that returns zeros proves nothing"
        worst = max(worst, float((y_MK.double() - out.double().view_as(y_MK)).norm() / out.double().norm()))
    return worst


def _greedy(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(5)  # block diffusion draws noise
    out = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    return out if isinstance(out, torch.Tensor) else out.sequences


def _first_difference(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one != other).any(dim=0).nonzero()[0]) - PROMPT[1] if one.shape == other.shape else 0


def evaluate_all(names: list[str], *, processes: int = 2) -> list[Row]:
    with concurrent.futures.ProcessPoolExecutor(max_workers=processes) as pool:
        return list(pool.map(evaluate, names))


def page(rows: list[Row]) -> str:
    def count(what: str) -> int:
        return sum(getattr(row, what) for row in rows)

    lines = [
        "# Coverage of transformers families",
        "",
        "Made by the test run (`tests/client/test_transformers_coverage.py`) with transformers"
        f" {transformers.__version__}; do not edit.",
        "",
        "Each family that has an experts module gets a tiny random checkpoint, written by transformers itself.",
        "*loads*: the service reads its experts by transformers' own conversion mapping. *layer*: every experts module agrees"
        f" with the local one to a relative L2 error of {TOLERANCE:.0e} in float32. *generate*: {NEW_TOKENS} greedy tokens of"
        " two prompts, with remote experts and a KV cache, are those of the local model.",
        "The columns after it are [layouts of quantised experts](checkpoints.md#layouts): a rank of the service loads them, and"
        " they mean to the bit what the tool that defines the layout says. *stacked*: this family's checkpoints hold all experts"
        " of a layer in one tensor, where no tool writes this layout.",
        "",
        f"{len(rows)} families: {count('loads')} load, {count('layer')} reach layer parity, {count('generate')} generate the"
        f" same tokens, {sum('no' not in row.stored and bool(row.stored) for row in rows)} load from every layout.",
        "",
        f"| family | architecture | activation | loads | layer | generate | {' | '.join(LAYOUTS)} | reason of a no |",
        "|---" * (7 + len(LAYOUTS)) + "|",
    ]
    for row in rows:
        marks = ["yes" if value else "no" for value in (row.loads, row.layer, row.generate)]
        cells = " | ".join((*marks, *(row.stored or ("no",) * len(LAYOUTS))))
        lines.append(f"| {row.family} | {row.architecture} | {row.activation} | {cells} | {row.reason} |")
    lines += ["", "## Not served", "", *(f"- **{name}**: {why}" for name, why in refused().items())]
    return "\n".join(lines) + "\n"


NOT_SERVED = {
    "llama4": "multiplies a token by its share before the experts instead of after them",
    "longcat_flash": "has experts without weights among those that its router chooses",
    "dbrx": "",
}
"""Families of transformers with experts that its experts interface does not know, and what is different about them."""
UNKNOWN = ("bailing_moe", "bailing_moe_v2", "arctic")
"""Published families whose code comes with the checkpoint."""


def refused() -> dict[str, str]:
    """Families that cannot be served, each with the words of the refusal."""
    found = {}
    for name, why in NOT_SERVED.items():
        with tempfile.TemporaryDirectory() as folder:
            config = transformers.AutoConfig.for_model(name)
            config.architectures = [cls.__name__ for cls in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.values()
                                    if cls.__name__.lower().startswith(name.replace("_", ""))][:1]  # fmt: skip
            config.save_pretrained(folder)
            found[name] = _refusal(Path(folder)) + (f"; it {why}" if why else "")
    for name in UNKNOWN:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({"model_type": name}))
            found[name] = _refusal(Path(folder)).partition(" (known")[0] + ", and transformers has no such model"
    return found


def _refusal(folder: Path) -> str:
    save_file({"lm_head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    try:
        open_checkpoint(folder)
    except EpserveError as error:
        return str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
    raise AssertionError(f"{folder} is served")


if __name__ == "__main__":
    asked = sys.argv[1:]
    found = evaluate_all(asked or families())
    for each in found:
        print(each)
    if not asked:
        PAGE.write_text(page(found))
