# make demo: set up, train on this machine, print the tables.   make check: style, types, shell scripts, documentation.
# make docs: the documentation as a site, in build/docs.
# make quick, make test, make test-all: more and more tests (CONTRIBUTING.md); make test-ci: those of CI.
# make flaky: test files that have changed, or FILES=..., on a busy machine whose processes stand still at times.
# make gpu: the first minutes on a GPU (benchmarks/first_minutes.py), with the wheels in WHEELS if there are any.
# make bench: the benchmarks behind the figures of docs/performance.md.   make testbed: five hosts to try (root).
# make dist: wheel and source distribution of the last commit in dist/, checked in new environments of every Python.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# With editable_mode=compat a path leads to this folder. Setuptools' default is a module that each Python imports at its
# start, which doubles the time that it takes. A variable, because pips before 22.1 have no such option, and ignore it.
# pip compiles the modules of packages on one core, which takes as long as all the rest: compileall uses all cores.
PIP := PIP_CONFIG_SETTINGS=editable_mode=compat $(BIN)/python -m pip --disable-pip-version-check install --quiet \
    --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true# some packages have files for other Pythons
CORES := $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)))')
AT_ONCE ?= $(shell expr 2 \* $(CORES))# tests side by side: most of them wait
MXNET := $(shell $(PYTHON) -c 'import sys; print(",mxnet" if sys.version_info < (3, 12) else "")')
PYTEST := $(BIN)/python -m pytest
SIDE_BY_SIDE := --maxprocesses 24 --dist loadgroup

# With this variable set, each process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-ci test-all flaky check docs dist bench gpu mutation mutation-changed testbed kubernetes clean system
.NOTPARALLEL:

demo: $(VENV)/demo.done
	$(BIN)/dmltrain-launch --launcher local -n 2 -s 2 --job demo --log-dir logs/demo \
	    examples/train_digits.py --kv-store dist_sync
	@echo
	@echo "Logs: logs/demo/worker-0.log, worker-1.log, server-0.log, server-1.log, scheduler-0.log; the job: logs/demo/job.json"
	@echo "Report: $(BIN)/dmltrain report logs/demo -o logs/demo/report.html, a page for your browser"
	@echo "Next: $(BIN)/dmltrain-launch -n 2 -s 2 examples/train_cifar10.py --data-dir data \\"
	@echo "          --network resnet --num-layers 20 --kv-store dist_sync --batch-size 64 --num-epochs 2"

quick: $(VENV)/test.done
	$(PYTEST) -n $(CORES) $(SIDE_BY_SIDE) -m "quick and not thorough and not exhaustive" $(PYTEST_ARGUMENTS)

# The markers are explained in pyproject.toml. Exit code 5 of pytest: there is none of those that were asked for.
test: TIER := and not thorough and not exhaustive
test-ci: TIER := and not exhaustive
test-ci: export DMLTRAIN_TEST_INPUTS ?= 1000
test-all: export DMLTRAIN_TEST_FUZZ ?= 20
test-all: export DMLTRAIN_TEST_INPUTS ?= 1000000
test test-ci test-all: system $(VENV)/test.done tests/__pycache__
	$(PYTEST) -n $(AT_ONCE) $(SIDE_BY_SIDE) -m "not alone $(TIER)" $(PYTEST_ARGUMENTS) || [ $$? = 5 ]
	$(PYTEST) -m "alone $(TIER)" $(PYTEST_ARGUMENTS) || [ $$? = 5 ]

# In a new clone each of the processes above would rewrite the assertions of all test files: this does it once.
tests/__pycache__:
	@find tests -name 'test_*.py' | xargs -P $(CORES) -n 64 $(PYTEST) --collect-only -q > /dev/null || true

flaky: $(VENV)/test.done
	$(BIN)/python -m tests.flaky $(FILES) $(if $(TIMES),--times $(TIMES)) $(if $(SECONDS),--seconds $(SECONDS))

check: $(VENV)/test.done docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run launch/bin/dmltrain tests/cluster/build_kubernetes

docs: $(VENV)/docs.done
	$(BIN)/python -m sphinx -W --keep-going -n -q -j auto -d build/docs-cache docs build/docs
	@echo "The site: build/docs/index.html"

dist: $(VENV)/dist.done
	rm -rf dist build/dist
	git archive --prefix build/dist/ HEAD | tar -x
	$(BIN)/python -m build --outdir dist build/dist
	$(BIN)/python -m twine check --strict dist/*
	DMLTRAIN_TEST_DIST=$(CURDIR)/dist $(PYTEST) -o timeout=1200 tests/test_pythons.py $(PYTEST_ARGUMENTS)

# Which small changes do the nearest tests notice? docs/mutation.md. MODULES=..., SAMPLE=..., MUTATION=more options
mutation: $(VENV)/mutation.done
	$(BIN)/python -m tests.mutation.run $(MODULES) $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTATION)

mutation-changed: $(VENV)/mutation.done
	$(BIN)/python -m tests.mutation.run --changed $(or $(BASE),main) $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTATION)

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/kvstore.py

# Where there is no network: PyTorch for this GPU and the rest as wheels, beside the packages that Python has already.
WHEELS ?= wheels
gpu: $(if $(wildcard $(WHEELS)/*.whl),$(VENV)/wheels.done,$(VENV)/test.done)
	$(BIN)/python benchmarks/first_minutes.py $(GPU)

testbed: $(VENV)/demo.done
	$(BIN)/python tests/cluster/testbed.py up

# The programs of Kubernetes that Debian has as source only, for the tests of --launcher kubernetes: once, in minutes.
kubernetes: system
	tests/cluster/build_kubernetes

clean:
	rm -rf $(VENV) build *.egg-info

system:
	@$(PYTHON) tests/system_packages.py $(VENV)

# Without Python's ensurepip an environment is made by half: it has no pip.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.done: setup.py constraints.txt dmltrain/version.py | $(BIN)/pip
	$(PIP) --editable '.[torch]'
	@$(COMPILE)
	@touch $@

$(VENV)/docs.done: setup.py constraints.txt | $(BIN)/pip
	$(PIP) --editable '.[docs]'
	@$(COMPILE)
	@touch $@

$(VENV)/test.done: $(VENV)/demo.done
	$(PIP) --editable '.[torch,adapters,images,lmdb,leveldb,plot,ray,ray-train,dev$(MXNET)]'
	@$(COMPILE)
	@touch $@

$(VENV)/wheels.done:
	$(PYTHON) -m venv --system-site-packages $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-index --no-deps $(WHEELS)/*.whl
	@touch $@

$(VENV)/dist.done: $(VENV)/test.done
	$(PIP) --editable '.[release]'
	@touch $@

$(VENV)/mutation.done: $(VENV)/test.done
	$(PIP) --editable '.[mutation]'
	@$(COMPILE)
	@touch $@
