# Everything runs in .venv, which these targets make and keep up to date: nothing has to be installed or active beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
PYTEST := $(BIN)/python -m pytest -n 2 --cov --cov-report=term

.DELETE_ON_ERROR:
.PHONY: help run test test-all lint format docs site models dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

run: $(VENV)/.rl ## in three minutes: how good the diagonals are, how networks and agents learn with them, and a page with all
	@$(BIN)/hesscale demo

test: lint site ## lint, type check, documentation site, tests, coverage
	$(PYTEST)

test-all: lint site $(VENV)/.integrations ## the same with the slow tests, and with the libraries of the extra integrations
	$(PYTEST) -m ""

lint: $(VENV)/.dev ## ruff, mypy and the import contracts alone
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict
	$(BIN)/lint-imports

format: $(VENV)/.dev ## let ruff format the code and fix what it can
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.experiments ## write docs/operators.md anew from the rules
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs ## build the documentation site into site/; warnings, such as broken links, are errors
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --strict --quiet

models: $(VENV)/.dev $(VENV)/.integrations ## write docs/models.md anew: what happens to other people's models, in ten minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/models/page.py

dist: export PYTHONPATH = # what is tried is the wheel
dist: | $(BIN)/python ## build a wheel and an sdist, check them, and try the wheel in an empty environment
	@rm -rf dist build
	$(INSTALL) build setuptools twine
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear dist/.venv
	dist/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && .venv/bin/python ../tests/smoke/library.py
	dist/.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[experiments]"
	cd dist && .venv/bin/hesscale quality --preset smoke --runs runs && .venv/bin/hesscale report --runs runs --out report
	@rm -rf dist/.venv dist/runs dist/report
	@ls -lh dist

clean: ## remove the environment, caches, plots and the site
	rm -rf $(VENV) out site build dist *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra of pyproject.toml: installed again when the requirements change.
$(VENV)/.experiments $(VENV)/.rl $(VENV)/.dev $(VENV)/.docs $(VENV)/.integrations: $(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/.torch
	@echo "installing hesscale[$*] into $(VENV)"
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation -e ".[$*]"
	@# BackPACK and laplace-torch ask for torchvision, which they do not need
	@if [ $* = dev ]; then $(INSTALL) --no-deps backpack-for-pytorch laplace-torch asdfghjkl curvlinops-for-pytorch einconv \
		linear_operator; fi
	@# timm asks for it too; its models do without (tests/models/torchvision_stub.py)
	@if [ $* = integrations ]; then $(INSTALL) --no-deps timm; fi
	@touch $@

# A torch that is there is kept. Without an NVIDIA GPU, the build without CUDA is tried first; pip finds it if its settings name an
# index that has it. PyPI does not, for Linux on x86-64. With --quiet, --verbose is pip's usual output, with a bar for the download.
$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "installing torch $(TORCH) into $(VENV)"; \
		{ ! command -v nvidia-smi >/dev/null && $(INSTALL) --verbose "torch==$(TORCH)+cpu" 2>/dev/null; } || { \
			echo "by pip's settings; on Linux with an x86-64 processor, PyPI's has CUDA, several gigabytes"; \
			$(INSTALL) --verbose torch; \
		}; \
	}
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or name one: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$$($(PYTHON) --version) is too old: name a Python 3.10 or newer with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) comes without venv: install it (Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
