# `make help` lists the targets. demo and test need nothing but Debian 12, root and a network.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
FUZZ_SECONDS ?= 60
SOAK_ARGS ?=

.PHONY: help setup package build demo demo-vllm test test-vllm test-oracle test-asan test-tsan test-mutants lint format wheel release-check bench bench-vllm fuzz soak soak-mooncake soak-vllm clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):[^#]*## (.*)/\1|\2/' | \
	  while IFS='|' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

setup: ## Install what is missing and build the package once
	@bash scripts/setup.sh

package: setup ## Bring the library and the Python package up to date with the sources
	@bash scripts/build.sh kvprism_package

build: setup ## The same and the tests
	@bash scripts/build.sh

demo: package ## Run the demonstration
	@.venv/bin/kvprism demo

demo-vllm: package ## Run the demonstration with the real vLLM on CPU (make test-vllm says more)
	@bash scripts/vllm_run.sh examples/vllm/demo.py

test: build ## C++ and Python tests
	@bash scripts/test.sh $(PYTEST_ARGS)

test-vllm: build ## Tests with the real vLLM on CPU; installs it in .venv-vllm (4 GB)
	@bash scripts/vllm_env.sh
	@.venv-vllm/bin/python tests/vllm/versions.py
	@bash scripts/vllm_run.sh -m pytest -p no:cacheprovider -o filterwarnings= -o testpaths= -n 2 --dist loadgroup -m 'not soak' tests/vllm $(PYTEST_ARGS)

soak-vllm: build ## Tests with the real vLLM that take long
	@bash scripts/vllm_run.sh -m pytest -p no:cacheprovider -o filterwarnings= -o testpaths= -m soak tests/vllm $(PYTEST_ARGS)

test-asan: ## C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer
	@bash scripts/sanitize.sh asan

test-tsan: ## C++ tests with ThreadSanitizer
	@bash scripts/sanitize.sh tsan

test-mutants: build ## Does the test suite notice deliberate mistakes?
	@$(PYTHON) tests/mutants/run.py $(MUTANT_ARGS)
	@$(PYTHON) tests/mutants/units.py

test-oracle: build ## The same decisions and keys as the real vLLM? ORACLE_ARGS go to it
	@bash scripts/vllm_env.sh
	@.venv-vllm/bin/python tests/oracle/compare.py $(ORACLE_ARGS)
	@.venv-vllm/bin/python tests/oracle/objects.py
	@.venv-vllm/bin/python tests/oracle/mutants.py

lint: package ## Formats, types, spelling, rooms
	@bash scripts/lint.sh

format: ## Rewrite sources, or FILES, into the project's format
	@bash scripts/setup.sh --tools
	@bash scripts/format.sh $(FILES)

wheel: setup ## Build dist/*.whl and check its contents
	@bash scripts/wheel.sh

release-check: setup ## Sdist, wheel, versions, consumers, links: what a release needs beside the tests
	@bash scripts/release_check.sh

bench: build ## The core beside its floors, ratios in build/bench/results.json; BENCH_ARGS go to the program
	@bash scripts/bench.sh $(BENCH_ARGS)

bench-vllm: package ## The connectors: vLLM's own scheduler, lookups, the first token of a long prompt
	@bash scripts/vllm_run.sh benchmarks/vllm/scheduler_bench.py $(BENCH_ARGS)
	@bash scripts/vllm_run.sh benchmarks/vllm/lookup_bench.py $(LOOKUP_ARGS)
	@bash scripts/vllm_run.sh benchmarks/vllm/first_token.py $(FIRST_TOKEN_ARGS)

fuzz: ## Fuzz for FUZZ_SECONDS (60)
	@bash scripts/fuzz.sh $(FUZZ_SECONDS)

soak-mooncake: build ## 100,000 requests against a real Mooncake with a small pool (about 20 min)
	@$(PYTHON) tests/soak/mooncake_soak.py $(SOAK_ARGS)

soak: build ## The simulation for 10 minutes, then faults with real processes (another 10); SOAK_ARGS go to the first
	@$(PYTHON) tests/soak/simulation_soak.py $(SOAK_ARGS)
	@$(PYTHON) tests/soak/faults_soak.py

clean: ## Remove build trees and the virtual environment
	@rm -rf build .venv dist python/kvprism/_core.pyi .pytest_cache .mypy_cache .ruff_cache .hypothesis
