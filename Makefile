# make demo: set up, train on this machine, print the tables.   make test: set up, run all tests.
# make check: style.   make docs: the documentation as a site, in build/docs.   make bench: the benchmarks behind the
# figures of docs/performance.md.   make testbed: five hosts to try (root).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
SIDE_BY_SIDE := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')  # tests wait, too
MXNET := $(shell $(PYTHON) -c 'import sys; print(",mxnet" if sys.version_info < (3, 12) else "")')

.PHONY: demo test check docs bench mutation mutation-changed testbed clean

demo: $(VENV)/demo.done
	$(BIN)/dmltrain-launch --launcher local -n 2 -s 2 --job demo --log-dir logs/demo \
	    examples/train_digits.py --kv-store dist_sync
	@echo
	@echo "Logs: logs/demo/worker-0.log, worker-1.log, server-0.log, server-1.log, scheduler-0.log; the job: logs/demo/job.json"
	@echo "Next: $(BIN)/dmltrain-launch -n 2 -s 2 examples/train_cifar10.py --data-dir data \\"
	@echo "          --network resnet --num-layers 20 --kv-store dist_sync --batch-size 64 --num-epochs 2"

test: $(VENV)/test.done
	$(BIN)/python -m pytest -n $(SIDE_BY_SIDE) --maxprocesses 4 --dist worksteal -m "not alone" $(PYTEST_ARGUMENTS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGUMENTS) || [ $$? = 5 ]  # 5: none of those that were asked for

check: $(VENV)/test.done
	$(BIN)/ruff check .

docs: $(VENV)/docs.done
	$(BIN)/python -m sphinx -W --keep-going -n -q -j auto -d build/docs-cache docs build/docs
	@echo "The site: build/docs/index.html"

# Which small changes do the nearest tests notice? docs/mutation.md. MODULES=..., SAMPLE=..., MUTATION=more options
mutation: $(VENV)/mutation.done
	$(BIN)/python -m tests.mutation.run $(MODULES) $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTATION)

mutation-changed: $(VENV)/mutation.done
	$(BIN)/python -m tests.mutation.run --changed $(or $(BASE),main) $(if $(SAMPLE),--sample $(SAMPLE)) $(MUTATION)

bench: $(VENV)/test.done
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/kvstore.py

testbed: $(VENV)/demo.done
	$(BIN)/python tests/cluster/testbed.py up

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/demo.done: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[torch]'
	@touch $@

$(VENV)/docs.done: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/test.done: $(VENV)/demo.done
	$(PIP) --editable '.[torch,plot,dev$(MXNET)]'
	@touch $@

$(VENV)/mutation.done: $(VENV)/test.done
	$(PIP) --editable '.[mutation]'
	@touch $@
