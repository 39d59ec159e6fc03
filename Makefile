# Everything a newcomer or CI needs; each target sets up what it uses and is safe to repeat.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
SHELL := bash
# The suite starts many processes: without cached bytecode each of them would compile the project anew.
export PYTHONDONTWRITEBYTECODE :=
DEFAULT := not slow and not gpu
# The environment is rebuilt when one of these or the version of Python changes.
STAMP := $(VENV)/.ready-$(shell { cat requirements.lock pyproject.toml Makefile; $(PYTHON) -V; } | sha256sum | cut -c1-16)

FAST := $(addprefix tests/,planner/plan rlhf_tasks/config rlhf_tasks/parallel/layout rlhf_tasks/user_code/test_forms.py)

.PHONY: help coverage pictures demo docs check format test test-ci test-slow lint venv lock wheel wheel-check clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'


$(STAMP):
	$(PYTHON) -c 'import sys; sys.exit("prefect-rlhf needs Python 3.11 or newer, this is %d.%d: set PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check --disable-pip-version-check
	@echo "compiling the plan search (a minute or two)"
	$(BIN)/prefect-rlhf plan --config deployments/examples/plan-ppo-7b-7b.yaml --time-limit 10 >/dev/null
	touch $@

venv: $(STAMP)  ## the virtual environment in .venv, with everything that is pinned

demo: $(STAMP)  ## SFT, reward model and PPO on 4 CPU ranks, watched in the Prefect UI
	$(BIN)/prefect-rlhf demo

# Tests of what is pure Python and needs no ranks.
PURE := $(addprefix tests/,planner rlhf_tasks/protocol rlhf_tasks/rehearsal)

# What $(1) marks, in two halves side by side: tests that start servers and clusters, then those in $(2); and the rest.
# A shell's background command ignores SIGINT, which tests send to what they start. What failed is said again at the end.
define HALVES
logs=$$(mktemp -d); env --default-signal=INT $(BIN)/python -m pytest -m "$(1) and not cluster" $(2:%=--ignore=%) >"$$logs/rest" 2>&1 & rest=$$!; \
set -o pipefail; $(BIN)/python -m pytest -m "$(1) and cluster" | tee "$$logs/cluster"; failed=$$?; \
$(if $(2),$(BIN)/python -m pytest -m "$(1)" $(2) | tee "$$logs/pure" || failed=1;) \
wait $$rest || failed=1; cat "$$logs/rest"; grep -hE "^(FAILED|ERROR) |^=+ .* in .*=+$$" "$$logs"/*; rm -r "$$logs"; exit $$failed
endef

test: $(STAMP)  ## the default suite in two halves: what starts servers and clusters, then what is pure; beside it the rest
	$(call HALVES,$(DEFAULT),$(PURE))

test-ci: $(STAMP)  ## what continuous integration runs: besides, runs end to end, pages, further layouts and faults
	$(call HALVES,(not slow or whole) and not gpu)

pictures: $(STAMP)  ## the pictures of the documentation, from the finished demo in runs/demo
	$(BIN)/python -m bench.screenshots runs/demo docs/pictures

coverage: $(STAMP)  ## the default suite, and which lines it leaves out
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "$(DEFAULT)"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-slow: $(STAMP)  ## everything, the learning runs included
	$(BIN)/python -m pytest -m "not gpu"

check: $(STAMP)  ## linters and a choice of fast tests
	$(MAKE) lint
	$(BIN)/python -m pytest -q -x $(FAST)

test-other: $(STAMP)  ## what continuous integration runs on a second Python (PYTHON=..., VENV=...): plans, configurations, protocol, rehearsals
	$(BIN)/python -m pytest -q $(FAST) $(addprefix tests/rlhf_tasks/,protocol rehearsal)

format: $(STAMP)  ## sort imports, format
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

lint: $(STAMP)  ## ruff, import-linter, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: $(STAMP)  ## a wheel in dist
	$(BIN)/python -m build --no-isolation

wheel-check: wheel  ## the wheel in a second environment, used outside the checkout
	PYTHON=$(abspath $(BIN)/python) sh tests/check_wheel.sh "$$(ls -t $(CURDIR)/dist/*.whl | head -1)"

lock:  ## needs uv; torch stays out: its CPU and CUDA builds differ in hash and dependencies
	echo 'torch ; python_version < "3"' > .lock-override
	uv pip compile --universal --generate-hashes --python-version 3.11 --all-extras --override .lock-override \
		--no-annotate --no-header -q pyproject.toml -o requirements.lock
	rm .lock-override

docs: $(STAMP)  ## the site in site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:  ## remove what make has made
	rm -rf $(VENV) build dist site *.egg-info
