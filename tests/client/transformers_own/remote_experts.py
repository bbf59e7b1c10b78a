"""A pytest plugin: a model with experts that is put into evaluation mode gets remote experts there.

The model is saved, served by one rank in this process, and loaded again in its own place. $EPSERVE_OWN_RESULTS names the file for
the results: of each test the outcome, the number of remote calls, and the end of a failure's message.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import epserve.transformers
from epserve.client.engines.transformers.remote_modules import remote_modules
from epserve.errors import CheckpointError
from epserve.models.expert_modules import find_layers
from tests.client.transformers_own.excluded import EXCLUDED
from tests.models.coverage_table import InProcess

results: dict[str, list] = {}
running: list[str] = []
services: list = []
converting = False
evaluate = PreTrainedModel.eval


class Counted(InProcess):
    def forward(self, *args, **kwargs):
        if running:
            results[running[0]][1] += 1
        return super().forward(*args, **kwargs)


def _eval(self):
    out = evaluate(self)
    if running and not converting and not remote_modules(self) and not any(each.is_meta for each in self.parameters()):
        _convert(self)
    return out


PreTrainedModel.eval = _eval


def _convert(model):
    global converting
    try:
        find_layers(model)
    except CheckpointError:
        return  # has no experts
    converting = True
    folder, state = tempfile.mkdtemp(prefix="epserve-own-"), torch.random.get_rng_state()
    try:
        model.save_pretrained(folder)
        service = epserve.transformers.connect(Counted(Path(folder), max_tokens=512))
        services.append(service)
        attention = model.config._attn_implementation
        more = {"attn_implementation": attention} if attention else {}
        remote = epserve.transformers.from_pretrained(
            folder, service, model_class=type(model), dtype=model.dtype, **more
        )
        evaluate(remote).requires_grad_(False)
        generation = vars(model).get("generation_config")
        vars(model).clear()
        vars(model).update(vars(remote))
        if generation is not None:
            model.generation_config = generation
    finally:
        converting = False
        torch.random.set_rng_state(state)
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items):
    excluded = [item for item in items if item.name in EXCLUDED]
    missing = EXCLUDED.keys() - {item.name for item in excluded}
    assert not missing, f"there is no test {', '.join(sorted(missing))}"
    items[:] = [item for item in items if item.name not in EXCLUDED]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    running[:] = [item.nodeid.split("::", 1)[1]]
    results[running[0]] = ["", 0, ""]
    yield
    running.clear()
    while services:
        services.pop().close()


def pytest_runtest_logreport(report):
    name = report.nodeid.split("::", 1)[1]
    found = results.setdefault(name, ["", 0, ""])
    if found[0] != "failed" and (
        report.when == "call" or report.outcome != "passed"
    ):  # a subtest may have failed before
        found[0], found[2] = report.outcome, str(report.longrepr)[-600:] if report.longrepr else ""
    if report.when == "teardown":  # what is known survives a run that is ended
        Path(os.environ["EPSERVE_OWN_RESULTS"]).write_text(json.dumps(results))
