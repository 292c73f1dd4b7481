# `make demo` and `make test` are all that a newcomer needs. Everything is installed in $(VENV), nothing elsewhere.

PYTHON ?= python3
VENV ?= .venv
JOB ?= examples/gpt-bytes.yaml
PEERS ?= 4

bin := $(VENV)/bin
install := $(bin)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-hosts test-docker release-check lint format generate clean

demo: $(VENV)/.installed
	$(bin)/atoll swarm $(JOB) --peers $(PEERS)

test: $(VENV)/.installed-dev
	$(bin)/python -m pytest -m "not release and not hosts and not docker" --numprocesses 2 --dist worksteal --durations 20

test-hosts: $(VENV)/.installed-dev
	$(bin)/python -m pytest -m "hosts and not release"

test-docker: $(VENV)/.installed-dev
	$(bin)/python -m pytest -m "docker and not release"

release-check: $(VENV)/.installed-dev
	$(bin)/python -m pytest -m release

lint: $(VENV)/.installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy coordinator peer protocol compression tests benchmarks
	$(bin)/lint-imports

format: $(VENV)/.installed-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

generate: $(VENV)/.installed-dev
	PYTHON=$(abspath $(bin)/python) protocol/generate.sh

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Atoll needs Python 3.11 or later, and $(PYTHON) is older: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Atoll into $(VENV) (the first time this downloads PyTorch and takes some minutes)"
	$(install) --editable .
	@touch $@

# Dependency groups need pip 25.1; the pip that comes with Python 3.11 is older.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(install) --upgrade "pip>=25.1"
	$(install) --editable ".[huggingface]" --group dev
	@touch $@
