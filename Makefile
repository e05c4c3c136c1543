# `make` alone lists what there is. Everything runs in .venv, which is made from `python3` and the pins in environments/.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
OLDEST_TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' environments/oldest-torch.txt)
OLDEST_VENV := .venv-torch-$(OLDEST_TORCH)
CONSTRAINTS := environments/development.txt

# Every kernel is compiled with the oldest supported Triton and the newest one; both lie beside the environment's own.
TRITON_VERSIONS := $(shell sed -n 's/^triton==\([0-9.]*\).*/\1/p' environments/further-triton.txt)
FURTHER_TRITON := $(TRITON_VERSIONS:%=$(VENV)/triton-%/complete)
AOT_CHECKS := $(TRITON_VERSIONS:%=test-aot-%)

# The environment is rebuilt when what it is made from changes, and when it has moved: its name says what it was made of.
FINGERPRINT := $(shell { cat pyproject.toml environments/*.txt src/decompose_k/_version.py; echo $(CURDIR); \
	$(PYTHON) --version; } 2>&1 | cksum | tr -d ' ')
ENVIRONMENT := $(VENV)/complete-$(FINGERPRINT)

# With several test processes on few cores, threads inside each only get in each other's way.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PYTEST := $(PY) -m pytest
NOT_CPU := --ignore=tests/aot --ignore=tests/interpreter --ignore=tests/package --ignore=tests/gpu

.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo bench readme test lint types test-cpu test-interpreter test-aot $(AOT_CHECKS) test-package test-gpu \
	test-torch-oldest format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "make %-17s %s\n", $$1, $$2 }'

demo: $(ENVIRONMENT) ## see Decompose-K at work on this machine; the report is demo-report/report.html
	env -u OMP_NUM_THREADS -u OPENBLAS_NUM_THREADS $(PY) -m decompose_k demo --output demo-report
	@echo "The report: $(CURDIR)/demo-report/report.html"

bench: $(ENVIRONMENT) ## half an hour of the study, continued where it stopped; bench-report/ (decompose-k bench --help)
	env -u OMP_NUM_THREADS -u OPENBLAS_NUM_THREADS $(PY) -m decompose_k bench --suite study --budget 30m \
		--output bench-report --resume
	@echo "The rows and the report: $(CURDIR)/bench-report"

readme: $(ENVIRONMENT) ## write the README's tables and plots from the records in results/
	$(PY) results/summarize.py

test: lint types test-cpu test-interpreter test-aot test-package ## everything that can be checked without a GPU
	@echo "make test: all passed"

lint: $(ENVIRONMENT) ## style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(ENVIRONMENT) ## the type checker
	$(PY) -m mypy

test-cpu: $(ENVIRONMENT) ## the tests of everything but device code
	$(PYTEST) -n $(WORKERS) $(NOT_CPU) tests

test-interpreter: $(ENVIRONMENT) ## the kernels' values, under Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) tests/interpreter

test-aot: $(AOT_CHECKS) ## the kernels compiled for four GPUs with each further Triton

$(AOT_CHECKS): test-aot-%: $(ENVIRONMENT) $(VENV)/triton-%/complete
	PYTHONPATH=$(VENV)/triton-$* $(PY) -c "import triton; assert triton.__version__ == '$*', triton.__version__"
	PYTHONPATH=$(CURDIR)/$(VENV)/triton-$* $(PYTEST) tests/aot

test-package: $(ENVIRONMENT) ## the wheel and the sdist, built and installed in an empty environment
	$(PYTEST) tests/package

test-torch-oldest: $(OLDEST_VENV)/complete ## what depends on torch's compiler, with the oldest supported torch (a large download)
	PYTHONPATH=src $(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) tests/inductor tests/test_operator.py tests/test_transforms.py

test-gpu: ## the contract on a GPU, with the torch, triton and pytest that python3 has; installs nothing
	PYTHONPATH=src $(PYTHON) tests/gpu/run_sharded.py

format: $(ENVIRONMENT) ## bring the code into shape
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove everything that make made
	rm -rf $(VENV) .venv-torch-* dist build demo-report bench-report .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(ENVIRONMENT):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "decompose-k needs Python 3.10 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`" >&2; exit 1; }
	@test ! -L $(VENV) || { echo "$(VENV) must be a folder: a link's target would be emptied" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { echo "no venv: on Debian, apt-get install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet --constraint $(CONSTRAINTS) hatchling
	$(PY) -m pip install --quiet --constraint $(CONSTRAINTS) --no-build-isolation --editable ".[cli,dev]"
	touch $@

$(OLDEST_VENV)/complete: environments/oldest-torch.txt
	$(PYTHON) -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --requirement environments/oldest-torch.txt
	touch $@

$(FURTHER_TRITON): $(VENV)/triton-%/complete: $(ENVIRONMENT)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) triton==$*
	touch $@
