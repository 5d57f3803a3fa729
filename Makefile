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

run: $(VENV)/.rl ## run three small experiments in about three minutes, and write a page about them
	@$(BIN)/hesscale demo

test: lint site ## run all checks: lint, types, documentation site, tests, coverage
	$(PYTEST)

test-all: lint site $(VENV)/.integrations ## run all checks, the slow tests, and the tests with other libraries
	$(PYTEST) -m ""

lint: $(VENV)/.dev ## run only ruff, mypy and the import contracts
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict
	$(BIN)/lint-imports

format: $(VENV)/.dev ## format the code and fix what ruff can fix
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.experiments ## update docs/operators.md from the rules
	$(BIN)/python docs/generate.py

site: $(VENV)/.docs ## build the documentation site in site/; warnings, such as broken links, are errors
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m mkdocs build --strict --quiet

models: $(VENV)/.dev $(VENV)/.integrations ## update docs/models.md with models of other libraries, in ten minutes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -W ignore tests/models/page.py

dist: export PYTHONPATH = # what is tried is the wheel
dist: | $(BIN)/python ## build a wheel and an sdist, check them, and test the wheel in an empty environment
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
			echo "this is torch's default build; on Linux it includes CUDA (several gigabytes)"; \
			$(INSTALL) --verbose torch; \
		}; \
	}
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or set its path: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$$($(PYTHON) --version) is too old: set the path of Python 3.10 or newer with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) comes without venv: install it (Debian and Ubuntu: the package python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
