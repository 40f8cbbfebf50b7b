# make demo    set up, then run the tiny experiment (a few minutes on two CPU cores)
# make test    set up, then run all tests
# make test-long  whole runs that are killed again and again
# make test-operating  `opd up` as people use it: forms in a browser, reruns, schedules, queues, secrets
# make test-teardown  end runs in every way at every moment, stand-ins and real ones (about an hour)
# make test-servers  build the servers' own environments, test real SGLang and LMDeploy (CPU): scoring,
#              sampling, weight sync, a whole run
# make check   the fast loop: format, lint, types, import contracts, core tests
# make bench   benchmarks: they measure and report, they assert nothing
# make results three seeds of tiny, tiny_mixed and tiny_grpo, and which was better (a quarter of an hour)
# make models  build the tiny models and their data again, from nothing
PYTHON ?= python3
PIP_ARGS ?=
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest
CODE = flows tasks opd_core deployments tests

.PHONY: install browser demo test test-long test-operating test-teardown test-servers check lint format bench results models clean

install:
	@.ci/make_env $(PYTHON) $(PIP_ARGS)

browser:
	@.ci/browser

demo: install
	.venv/bin/opd run tiny

test: install browser
	$(PYTEST)

test-long: install
	$(PYTEST) -m long tests --ignore=tests/operating

OPERATING ?= tests/operating
test-operating: install browser
	$(PYTEST) -m long $(OPERATING)

# With the sample that `make test` runs; the real SGLang cells need its environment.
test-teardown: install
	.venv/bin/opd prepare sglang --device cpu
	rm -f runs/teardown.jsonl
	OPD_TEARDOWN_REPORT=runs/teardown.jsonl $(PYTEST) -m "teardown or slow" tests/teardown
	.venv/bin/python -m tests.teardown.report runs/teardown.jsonl > docs/teardown-matrix.md

# Selected by name, a missing environment is a failure and no skip.
test-servers: install
	.venv/bin/opd prepare sglang --device cpu
	.venv/bin/opd prepare lmdeploy --device cpu
	OPD_SERVERS_REPORT=runs/servers.json $(PYTEST) -m servers tests/servers

check: lint
	$(PYTEST) -m "not slow and not long and not servers and not teardown" -x -q

lint: install
	.venv/bin/ruff format --check $(CODE)
	.venv/bin/ruff check $(CODE)
	.venv/bin/python -m mypy

format: install
	.venv/bin/ruff format $(CODE)
	.venv/bin/ruff check --fix $(CODE)

bench: install
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.benchmarks $(ONLY)

# The page docs/results/comparison.md is what this writes.
RESULTS = runs/results
results: install
	for seed in 1234 1 2; do for recipe in tiny tiny_mixed tiny_grpo; do \
	  .venv/bin/opd run $$recipe --set seed=$$seed --set run.root=$(RESULTS) || exit 1; done; done
	.venv/bin/opd eval teacher --recipe tiny --out $(RESULTS)/teacher.json
	.venv/bin/opd compare $$(ls -d $(RESULTS)/tiny-2* $(RESULTS)/tiny-mixed-* $(RESULTS)/tiny-grpo-*) \
	  --reference teacher=$(RESULTS)/teacher.json --out docs/results

models: install
	OMP_NUM_THREADS=1 .venv/bin/python -m deployments.recipes.assets.tiny.build

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
