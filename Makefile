# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
# What each target costs: CONTRIBUTING.md.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What needs the environments of the engines beside our own: `make test-engines`.
ENGINE_VENVS := .venv-sglang/.done .venv-vllm/.done .venv-peers/.done .venv-crate/.done
# Two spinning OpenMP threads a job starve each other on a busy machine.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE ?= 1

.PHONY: venv chromium venv-sglang venv-vllm venv-peers venv-crate demo demo-smoke demo-sglang report test test-durability test-engines chaos lint schema lock clean help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

venv: $(VENV)/.done  ## everything that the pipeline and its tests need, in .venv

$(VENV)/.done: envs/trainer.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement envs/trainer.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

venv-vllm: .venv-vllm/.done  ## vLLM for CPUs, apart from the trainer: their pins of torch's surroundings disagree

# pip leaves what fits the lock as it is. --no-deps: the lock is whole but for what must not be there (envs/lock.py).
.venv-vllm/.done: envs/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps --requirement envs/vllm.txt
	touch $@

venv-peers: .venv-peers/.done  ## SpecForge and speculators, for benchmarks.peers and what they read of ours

.venv-peers/.done: envs/peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --no-deps --requirement envs/peers.txt
	touch $@

venv-crate: .venv-crate/.done  ## validators of RO-Crates, for tests/engines/test_crate_validators.py

.venv-crate/.done: envs/crate.txt
	$(PYTHON) -m venv .venv-crate
	.venv-crate/bin/python -m pip install --quiet --requirement envs/crate.txt
	touch $@

venv-sglang: .venv-sglang/.done  ## SGLang, for this machine's driver or its CPU

# Made once, never replaced: a run may be under way with it.
.venv-sglang/.done:
	$(PYTHON) -m venv .venv-sglang
	if [ -e /proc/driver/nvidia/version ]; then \
	  .venv-sglang/bin/python -m pip install --quiet --requirement envs/sglang.in; \
	else \
	  .venv-sglang/bin/python -m pip install --quiet --no-deps --requirement envs/sglang-cpu.txt; \
	fi
	touch $@

# What opens the report in tests/test_report.py, which is left out where there is none.
chromium:  ## headless Chromium, from Debian's packages (as root)
	command -v chromium >/dev/null || \
	  (apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null)

demo: venv  ## the main job: a draft for SmolLM2-135M, measured, with a report
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --cores all --resources gpu=8
	$(MAKE) --no-print-directory report
	@cat results/summary.md

demo-smoke: venv  ## the same chain at the smallest size
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --cores all --configfile config/smoke.yaml
	$(MAKE) --no-print-directory report CONFIG=config/smoke.yaml
	@cat results/summary.md

demo-sglang: venv venv-sglang  ## the main job with a SGLang server on the CPU
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --cores all --configfile config/demo-sglang.yaml
	$(MAKE) --no-print-directory report CONFIG=config/demo-sglang.yaml
	@cat results/summary.md

CONFIG ?= config/config.yaml
report: venv  ## report.html of a finished run, offline
	PATH="$(CURDIR)/$(BIN):$$PATH" snakemake --configfile $(CONFIG) --report report.html

WORKFLOWS := tests/test_durability.py tests/test_imported.py tests/test_recomputed.py
test: venv  ## all tests but those of the next targets (under 12 minutes on two cores)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(foreach file,$(WORKFLOWS) tests/engines,--ignore=$(file))

test-durability: venv  ## whole workflows that lose files, records and room or change, and go on
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest --dist=worksteal $(WORKFLOWS)

# Of the engines' tests: all, or by `-m`.
ENGINE_TESTS ?=
test-engines: venv $(ENGINE_VENVS)  ## a real SGLang server extracts; vLLM decodes with the exported draft; the peers read our datasets
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest --numprocesses=0 --timeout=1500 tests/engines $(ENGINE_TESTS)

chaos: venv  ## kill, fill, cut, flip: 700 times; the last line says what was lost
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/chaos --chaos=full --dist=worksteal --timeout=1500

lint: .venv-lint/.done venv  ## ruff, snakefmt, codespell, mypy
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/snakefmt --check Snakefile rules
	.venv-lint/bin/codespell
	.venv-lint/bin/mypy

.venv-lint/.done: envs/lint.txt
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/python -m pip install --quiet --requirement envs/lint.txt
	touch $@

schema: venv  ## config/config.schema.json and config/README.md from eagle3lib/config.py
	$(BIN)/python -m eagle3lib schema > config/config.schema.json
	(cat config/README.head.md; $(BIN)/python -m eagle3lib keys) > config/README.md

lock: venv  ## pin anew what pyproject.toml and envs/lint.in ask for
	$(BIN)/python envs/lock.py

clean:  ## remove results, logs and Snakemake's records; the environments stay
	rm -rf results logs .snakemake report.html
