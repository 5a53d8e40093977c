# Needs Python 3.11 or newer and make; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOWEST := .venv-lowest
# Packages are installed without compiled modules, see below: Python keeps those that it has compiled.
unexport PYTHONDONTWRITEBYTECODE
# One test file of every kind: what `make test-fast` runs on the oldest Python.
FAST := tests/core/test_metrics.py tests/run/test_checkpoint.py \
  tests/algorithms/clients/test_fed_ntd.py tests/algorithms/pools/test_gradient_merging.py \
  tests/data/test_partition.py tests/data/test_tff.py tests/models/test_headed.py \
  tests/config/test_settings.py tests/end_to_end/test_command.py

PEERS := $(notdir $(patsubst %/requirements.txt,%,$(wildcard benchmarks/peers/*/requirements.txt)))

.PHONY: demo demo-text test test-fast test-slow test-lowest lint format docs bench bench-check bench-peers wheel clean

demo: $(INSTALLED)
	$(BIN)/python -m fedcodist.commands.demo

demo-text: $(INSTALLED)
	$(BIN)/python -m fedcodist.commands.demo_text

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST)

# The whole suite in an environment that holds exactly the lower bounds of setup.py.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in site/; fails on a link that leads nowhere.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/python -m mkdocs build

# Measures everything anew, writes BENCHMARKS.md and prints it.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/time_to_result.py
	$(BIN)/python benchmarks/fedavg_cnn.py --results results/benchmarks
	$(BIN)/python benchmarks/side_by_side.py
	-$(BIN)/python benchmarks/side_by_side.py --check  # fails where weights differ, and is written too
	$(BIN)/python benchmarks/breakdown.py
	$(BIN)/python benchmarks/cold_start.py
	$(BIN)/python benchmarks/program_size.py
	-$(BIN)/python benchmarks/overhead.py  # fails beyond its target, and is written all the same
	-$(BIN)/python benchmarks/privacy_cost.py  # so does this one
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/distillation_cost.py
	$(BIN)/python benchmarks/svd_cost.py
	$(BIN)/python benchmarks/document.py

# Fails where a ratio fell below the recorded one or could not be measured; make ends with status 2
# whatever the script's.
bench-check: $(INSTALLED)
	$(BIN)/python benchmarks/check.py

# An environment for each peer; `make -k bench-peers` goes on where one cannot be installed.
bench-peers: $(PEERS:%=.venv-peers/%/.installed)

wheel: $(INSTALLED)
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(LOWEST) .venv-peers build dist *.egg-info

# Python compiles a module when it is first imported: most of the packages' modules never are.
$(INSTALLED): setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@

$(LOWEST)/.installed: setup.py
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --editable .
	$(LOWEST)/bin/python .ci/lower_bounds.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --editable ".[dev]" --constraint $(LOWEST)/constraints.txt
	touch $@

.venv-peers/%/.installed: benchmarks/peers/%/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	touch $@
