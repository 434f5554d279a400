# Each target makes .venv, installs what it needs and runs its twin, `python -m kvlab TARGET`, which is where the commands
# are written down. Without make (Windows): make a virtual environment and install the extra named beside the target below,
# `python -m pip install -c constraints.txt -e ".[test]"`, then call the twin.
#
#   make test PYTHON=python3.12     chooses the interpreter that .venv is made with (3.11, 3.12 or 3.13)
#   make test ARGS="-k arena -x"    hands arguments to the twin (here to pytest)
# Start afresh: rm -rf .venv

PYTHON ?= python3
ARGS ?=
DEST ?=
VENV := .venv
comma := ,
TWIN := $(VENV)/bin/python -m kvlab

.PHONY: help demo serve test test-all lab labs solutions student lint clean

help:
	@echo "make demo       the tour: one workload through three ways of managing the KV cache   [engine]"
	@echo "make serve      the OpenAI server with the shipped model; ARGS=\"--port 8001\"          [engine,serve]"
	@echo "make test       the tests without the slow ones                                      [test]"
	@echo "make test-all   all of them, long fuzzing too                                        [test]"
	@echo "make lab        JupyterLab on work/, your own copies of the labs                     [engine,labs]"
	@echo "make labs       for authors: labs/ from solutions/; ARGS=--check only compares       [labs]"
	@echo "make solutions  for authors: run the solved labs, to solutions/html                  [engine,labs]"
	@echo "make student    for authors: the tree that a class clones, DEST=../folder            [labs]"
	@echo "make lint       ruff                                                                 [lint]"
	@echo "make clean      remove caches and build output, keep .venv"

demo: $(VENV)/.has-engine
	$(TWIN) demo $(ARGS)

serve: $(VENV)/.has-engine,serve
	$(TWIN) serve $(ARGS)

test: $(VENV)/.has-test
	$(TWIN) test $(ARGS)

test-all: $(VENV)/.has-test
	$(TWIN) test-all $(ARGS)

lab: $(VENV)/.has-engine,labs
	$(TWIN) lab $(ARGS)

labs: $(VENV)/.has-labs
	$(TWIN) labs $(ARGS)

solutions: $(VENV)/.has-engine,labs
	$(TWIN) solutions $(ARGS)

student: $(VENV)/.has-labs
	$(TWIN) student $(strip $(DEST) $(ARGS))

lint: $(VENV)/.has-lint
	$(TWIN) lint $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# One stamp per set of extras: pip runs only when it is missing, or older than what it was made from.
$(VENV)/.has-%: pyproject.toml constraints.txt | $(VENV)/.made
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[$*]"
	@touch "$@" $(if $(filter test,$*),$(addprefix $(VENV)/.has-,engine labs engine$(comma)labs engine$(comma)serve))

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "kvlab needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || echo 'not there')."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@if [ "$$(uname -s)" = Linux ] && [ -z "$$PIP_EXTRA_INDEX_URL" ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "No NVIDIA GPU found. If pip is about to fetch nvidia-* packages (3 GB), stop it and get torch's CPU build:"; \
	  echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)"; fi
	$(PYTHON) -m venv $(VENV)
	@touch $@
