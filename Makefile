# The commands of the README. Everything happens in .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo

SEEDS ?= 2000
MINUTES ?= 5
SECONDS ?= 60
# Three on two cores: tests that wait for servers and timers leave room for others.
TEST_PROCESSES ?= 3
RAY_TEST_PROCESSES ?= 2
KUBE_PROCESSES ?= 2

# Some machines keep Python from writing bytecode. Then each of the processes that tests start compiles
# everything again, and pytest rewrites all assertions in each of its workers. Empty means: write it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-spark demo-kafka demo-lakehouse test test-rest test-all sim sim-mutants chaos fuzz kube-programs test-kube kube-up test-image test-k8s-node dashboards ui-pictures bench bench-state bench-backpressure bench-recovery bench-regions bench-spark bench-connectors lint types docs check clean

help:
	@echo "make demo    run the main job: kill a worker half-way, recover, compare with a batch answer"
	@echo "make demo-spark    the same, fed by a Spark query over three tables, which runs once"
	@echo "make demo-kafka    from Kafka to Kafka, while workers, the coordinator and the broker are killed (ARGS='--kills 20 --seed 1'; five minutes)"
	@echo "make demo-lakehouse    from PostgreSQL by way of Kafka to Iceberg, while jobs and servers are killed (ARGS='--kills 12 --seed 1'; two minutes)"
	@echo "make test    run the tests to run before each commit (five minutes on two cores)"
	@echo "make test-rest   run all other tests: slow ones, and those that start Ray or kill processes"
	@echo "make test-all    both: every test that needs no outside server"
	@echo "make sim     simulate jobs through trouble (SEEDS=20000: an hour and more on two cores)"
	@echo "make chaos   kill the processes of a job all the time, and compare its output (MINUTES=30, ARGS=--seed 1)"
	@echo "make sim-mutants   plant bugs, and see that the simulation finds each (half an hour)"
	@echo "make fuzz    random manifests, expressions, records and damaged files (SECONDS=1800, ARGS='--target records')"
	@echo "make test-kube   run the tests that need Kubernetes, on an API server built from the Go module proxy (as root)"
	@echo "make test-image   build the image without Docker, and run a job in it (as root; five minutes)"
	@echo "make test-k8s-node   build the image, and run jobs in containers of a real kubelet (as root; Debian)"
	@echo "make kube-up   start such a cluster to try things in, until Ctrl-C (as root)"
	@echo "make dashboards   draw the dashboards of a live run into docs/images (as root)"
	@echo "make ui-pictures   draw the web UI of a live run into docs/images"
	@echo "make bench   run the benchmarks, beside Flink where it is installed (ARGS=--quick: fewer records, p=1)"
	@echo "make bench-state   what keyed state costs (ARGS=--full: the real sizes, half an hour)"
	@echo "make bench-backpressure   checkpoints in front of a slow sink, in five modes (five minutes)"
	@echo "make bench-recovery   from kill -9 of a worker to output again (eight minutes; ARGS='--keys 100000 --kills 3': two)"
	@echo "make bench-regions   restart of one region out of four, beside that of the whole job (two minutes)"
	@echo "make bench-connectors   throughput of every sink and source (ten minutes; ARGS='--only kafka,redis': some)"
	@echo "make bench-spark   what a Spark query made, streamed; state read into Spark (ten minutes)"
	@echo "make docs    build the documentation site into build/site, and check its links"
	@echo "make check   lint and types"

# $(call install,EXTRA): headgate with one of its extras, into $(VENV).
define install
	@echo "==> installing headgate with the extra $(1) into $(VENV) (a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --editable '.[$(1)]'
	@touch $@
endef

$(STAMP): pyproject.toml
	$(call install,dev)

# The extra dev has everything that the demo needs.
$(DEMO_STAMP): pyproject.toml
	$(call install,demo)

demo:
	@test $(STAMP) -nt pyproject.toml || $(MAKE) --no-print-directory $(DEMO_STAMP)
	@$(BIN)/python examples/demo.py

demo-spark: $(STAMP)
	@$(BIN)/python examples/flights_spark_demo.py

demo-kafka: $(STAMP)
	@$(BIN)/python examples/flights_kafka_demo.py $(ARGS)

demo-lakehouse: $(STAMP)
	@$(BIN)/python examples/lakehouse_demo.py $(ARGS)

# Only these have tests of the Ray tier, and the others take ten seconds to import.
RAY_TESTS = $$(grep -rlE "mark\.(ray|chaos)" tests --include="test_*.py" | sort)

# tests/tiers.py says which tests are in which tier.
test: $(STAMP)
	@echo "==> running the fast tests (five minutes on two cores)"
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not rest and not kube"

test-rest: $(STAMP)
	@echo "==> running the slow tests (half an hour on two cores)"
	@failed=0; $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "rest and not (ray or chaos or kube)" || failed=1; \
	echo "==> running the tests that start Ray, file by file (eight minutes)"; \
	$(BIN)/python -m pytest -n $(RAY_TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "(ray or chaos) and not kube" $(RAY_TESTS) || failed=1; exit $$failed

test-all: $(STAMP)
	@failed=0; $(MAKE) --no-print-directory test || failed=1; \
	HEADGATE_THOROUGH=1 $(MAKE) --no-print-directory test-rest || failed=1; exit $$failed

sim: $(STAMP)
	@$(BIN)/python -m headgate.tests.sim --seeds $(SEEDS) $(ARGS)

sim-mutants: $(STAMP)
	@$(BIN)/python -m headgate.tests.sim.mutate $(ARGS)

chaos: $(STAMP)
	@$(BIN)/python -m headgate.tests.chaos --minutes $(MINUTES) $(ARGS)

fuzz: $(STAMP)
	@$(BIN)/python -m headgate.tests.fuzz --seconds $(SECONDS) $(ARGS)

# Ten minutes of two cores, once; the programs are kept in ~/.cache/headgate-tests (or in HEADGATE_TEST_CACHE).
kube-programs: $(STAMP)
	@echo "==> the programs of Kubernetes, unless they are in the cache"
	@$(BIN)/python -m headgate.tests.support.kube.programs

test-kube: kube-programs
	@echo "==> running the tests that need Kubernetes"
	@$(BIN)/python -m pytest -n $(KUBE_PROCESSES) --dist loadfile --no-loadscope-reorder -m kube tests/kube $(ARGS)

kube-up: kube-programs
	@$(BIN)/python -m headgate.tests.support.kube

test-image: $(STAMP)
	@$(BIN)/python -m headgate.tests.support.kube.image

test-k8s-node: kube-programs
	@$(BIN)/python -m headgate.tests.support.kube.node

# Both tests run a job and a Prometheus, and draw what it has; the second one needs Kubernetes.
dashboards: kube-programs
	@echo "==> drawing the dashboards of a live run into docs/images (five minutes)"
	@HEADGATE_DASHBOARD_PICTURES=$(CURDIR)/docs/images $(BIN)/python -m pytest -q tests/monitoring/test_live.py
	@HEADGATE_DASHBOARD_PICTURES=$(CURDIR)/docs/images $(BIN)/python -m pytest -q -m kube tests/kube/test_operator_metrics.py

ui-pictures: $(STAMP)
	@echo "==> drawing the web UI of a live run into docs/images (three minutes)"
	@$(BIN)/python -m headgate.tests.ui.pictures docs/images

bench: $(STAMP)
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-state: $(STAMP)
	@$(BIN)/python benchmarks/state_run.py $(ARGS)

bench-backpressure: $(STAMP)
	@$(BIN)/python benchmarks/backpressure.py $(ARGS)

bench-recovery: $(STAMP)
	@$(BIN)/python benchmarks/recovery.py $(ARGS)

bench-regions: $(STAMP)
	@$(BIN)/python benchmarks/region_restart.py $(ARGS)

bench-spark: $(STAMP)
	@$(BIN)/python benchmarks/spark/stream_result.py $(ARGS)
	@$(BIN)/python benchmarks/spark/state_read.py

bench-connectors: $(STAMP)
	@$(BIN)/python benchmarks/connectors.py $(ARGS)

lint: $(STAMP)
	@echo "==> lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "==> types"
	@mkdir -p .cache/src && ln -sfn ../.. .cache/src/headgate
	@MYPYPATH=.cache/src $(BIN)/mypy -p headgate

docs: $(STAMP)
	@echo "==> the documentation site"
	@$(BIN)/python .ci/site/build.py

check: lint types

clean:
	rm -rf $(VENV) .cache build dist *.egg-info demo-out
