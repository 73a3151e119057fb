# Everything runs in virtual environments of its own, in this folder.
#   make demo    stock Dask against the runtime, on real data, in about five minutes
#   make test    the test suite, against both supported ends of dask and distributed
#   make test-floor    some tests with the lowest versions of pandas, NumPy and pyarrow
#   make test-standins    the tests of GPUs, on a stand-in for AMD's driver over host memory
#   make test-upstream DISTRIBUTED=/path/to/clone    distributed's own tests, with the runtime on
#   make test-dask    Dask's own tests of arrays and dataframes, on a cluster with the runtime
#   make test-suite SUITE=/path/to/clone    tests of a package on top of Dask, the same way
#   make test-thirdparty    programs on top of xgboost, xarray and others, stock against the runtime
#   make check   style, types, which module may import which, and the documentation
#   make docs    the documentation as a site, in docs/_build/html; warnings are errors
#   make coverage    lines and branches that the unit tests reach
#   make bench   the benchmarks behind docs/performance.md
#   make .venv-peers/installed    the engines that `python -m benchmarks.peers` compares with

PYTHON ?= python3
OLDEST := 2026.7.1
NEWEST := 2026.8.0
# The lowest versions of setup.cfg. Python 3.13 and later have no wheels of them.
FLOOR := pandas==2.3.0 numpy==2.0.0 pyarrow==16.0.0
CUPY_ROCM := 14.2.0
TORCH := 2.13.0+cpu
VENV := .venv
VENV_NEWEST := .venv-newest
VENV_FLOOR := .venv-floor
VENV_THIRDPARTY := .venv-thirdparty
VENV_OTHER := .venv-other
VENV_DOCS := .venv-docs
VENV_HIP := .venv-hip
VENV_PEERS := .venv-peers
SOURCES := setup.cfg pyproject.toml $(shell find dask_gpurt -name '*.py' -o -name '*.yaml')
# More than there are cores: most tests of clusters wait for processes to start and to end.
JOBS ?= 3

# Another minor version of Python, for tests of clusters that have two: the first one that runs. Where
# there is none, those tests are skipped. `make OTHER_PYTHON= test` leaves them out.
ifndef OTHER_PYTHON
OTHER_PYTHON := $(shell \
    here=$$($(PYTHON) -c 'import sys; print(sys.version_info[1])'); \
    for one in python3.12 python3.13 python3.14 python3.11 \
        $(HOME)/.pyenv/versions/*/bin/python3.1[1-9]; do \
        "$$one" -c "import ssl, sys, venv; sys.exit(sys.version_info[1] == $$here)" \
            >/dev/null 2>&1 && { echo "$$one"; break; }; \
    done)
endif

# The newest Python here, for the newest versions of all packages: many need more than Python 3.11.
ifndef NEWEST_PYTHON
NEWEST_PYTHON := $(shell \
    for one in python3.14 $(HOME)/.pyenv/versions/3.14*/bin/python \
        python3.13 $(HOME)/.pyenv/versions/3.13*/bin/python \
        python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python $(PYTHON); do \
        "$$one" -c "import ssl, venv" >/dev/null 2>&1 && { echo "$$one"; break; }; \
    done)
endif

HAS_FLOOR := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info < (3, 13) else "")')

comma := ,

.PHONY: demo environments test test-oldest test-newest test-standins test-upstream test-dask \
    test-suite test-thirdparty test-floor check style docs coverage bench clean

demo: $(VENV)/installed
	$(VENV)/bin/dask gpurt demo

test: test-oldest test-newest $(if $(HAS_FLOOR),test-floor) test-standins

# All that `make check` and `make test` need. `make -j3 environments` makes them side by side.
environments: $(VENV)/installed $(VENV_NEWEST)/installed $(VENV_DOCS)/installed \
    $(VENV_HIP)/installed $(if $(HAS_FLOOR),$(VENV_FLOOR)/installed) \
    $(if $(OTHER_PYTHON),$(VENV_OTHER)/installed)

# Of the programs on top of other packages, this runs those whose packages are small. All of them have
# a target of their own, `test-thirdparty`.
#
# Each test runs once: the slow, process-heavy ones with the oldest versions, most others of plugins
# and clusters with the newest ones. Those of private names of dask and distributed run with both.
test-oldest: $(VENV)/installed $(if $(OTHER_PYTHON),$(VENV_OTHER)/installed)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	    --ignore tests/test_architecture.py -m "not newest" tests

test-newest: $(VENV_NEWEST)/installed
	$(VENV_NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" \
	    tests/plugins tests/integration tests/simulate

# With the lowest versions that setup.cfg allows, this runs the tests that depend on them most.
test-floor: $(VENV_FLOOR)/installed
	$(VENV_FLOOR)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow" \
	    tests/frames tests/plugins/shuffle $(addprefix tests/integration/test_, dtypes.py rechunk.py \
	    properties.py shapes.py own_classes.py transport.py dashboard_page.py)

# The tests of GPUs, with CuPy for ROCm on a stand-in for AMD's driver (tests/standins/hip).
test-standins: $(VENV_HIP)/installed
	$(VENV_HIP)/bin/python -m tests.standins.hip_run -m pytest -n $(JOBS) \
	    tests/gpu tests/standins tests/devices/cuda tests/frames/device/test_cupy_values.py

# distributed's packages come without its tests, so DISTRIBUTED is a clone of it. Not a part of
# `test`, which needs nothing that an installation does not bring.
UPSTREAM_VENV ?= $(VENV)
UPSTREAM_TESTS := \
    $(patsubst %,shuffle/tests/test_%.py,\
        shuffle merge merge_column_and_index rechunk graph metrics shuffle_plugins) \
    $(patsubst %,tests/test_%.py,\
        worker_memory worker worker_metrics active_memory_manager actor as_completed \
        cancelled_state chaos client client_executor client_loop cluster_dump collections \
        computations dask_collections event_logging events failed_workers gc locks multi_locks \
        priorities profile publish queues reschedule resources scheduler semaphore spans steal \
        stories stress tls_functional variable versions worker_client worker_state_machine) \
    $(patsubst %,deploy/tests/test_%.py,adaptive cluster spec_cluster) \
    $(patsubst %,diagnostics/tests/test_%.py,\
        cluster_dump_plugin eventstream graph_layout memory_sampler progress progress_stream \
        scheduler_plugin task_stream worker_plugin) \
    $(patsubst %,dashboard/tests/test_%.py,scheduler_bokeh worker_bokeh) \
    http/worker/tests/test_worker_http.py

test-upstream: $(UPSTREAM_VENV)/installed
	test -d "$(DISTRIBUTED)/distributed/shuffle/tests" || \
	    { echo "DISTRIBUTED must be a clone of distributed" >&2; exit 2; }
	$(UPSTREAM_VENV)/bin/python -m pytest -c $(DISTRIBUTED)/pyproject.toml \
	    --rootdir $(DISTRIBUTED) --import-mode=importlib -p tests.upstream.plugin \
	    -q -n $(JOBS) --timeout-method=signal --tb=native $(UPSTREAM_OPTIONS) \
	    $(UPSTREAM_TESTS:%=$(DISTRIBUTED)/distributed/%)

# Dask's packages come with its tests. All of them take some hours of a core; the tests of
# `tests/upstream` run a few of them.
DASK_TESTS ?= array dataframe

test-dask: $(UPSTREAM_VENV)/installed
	site=$$($(UPSTREAM_VENV)/bin/python -c \
	    'import dask, pathlib; print(pathlib.Path(dask.__file__).parents[1])') && \
	$(UPSTREAM_VENV)/bin/python -m pytest -c tests/upstream/dask.ini --rootdir $$site \
	    -p tests.upstream.dask_plugin -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(DASK_OPTIONS) \
	    $(DASK_TESTS:%=$$site/dask/%)

# The tests of a package on top of Dask, from a clone of it. The package itself has to be installed.
SUITE_TESTS ?= tests

test-suite: $(VENV_THIRDPARTY)/installed
	$(VENV_THIRDPARTY)/bin/python -m pytest -c tests/upstream/dask.ini -o addopts=-ra --tb=native \
	    --rootdir $(SUITE) -p tests.upstream.dask_plugin -q -n $(JOBS) --dist loadfile \
	    --no-loadscope-reorder $(DASK_OPTIONS) $(SUITE_TESTS:%=$(SUITE)/%)

# In an environment of its own: these packages bring a gigabyte of others.
test-thirdparty: $(VENV_THIRDPARTY)/installed
	GPURT_TESTS=all $(VENV_THIRDPARTY)/bin/python -m pytest tests/thirdparty

# `make -j2 check` builds the documentation beside the rest.
check: docs style

style: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy dask_gpurt benchmarks
	$(VENV)/bin/python -m pytest -q tests/test_architecture.py

# From scratch each time: what a page includes may have changed although the page has not.
docs: $(VENV_DOCS)/installed
	$(VENV_DOCS)/bin/sphinx-build -q -E -W --keep-going -b html docs docs/_build/html

# Unit tests only: what clusters run in processes of their own is not counted.
UNIT_TESTS := $(filter-out \
    $(patsubst %,tests/%/,conformance data demo failure fuzz gpu integration thirdparty upstream),\
    $(wildcard tests/*/))

coverage: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not cluster" \
	    --cov --cov-report=term --cov-report=html:htmlcov $(UNIT_TESTS) $(wildcard tests/test_*.py)

bench: $(VENV)/installed
	mkdir -p benchmarks/results
	$(VENV)/bin/python -m benchmarks.shuffle --json benchmarks/results/shuffle.json
	$(VENV)/bin/python -m benchmarks.ways --json benchmarks/results/ways.json
	$(VENV)/bin/python -m benchmarks.merge --json benchmarks/results/merge.json
	$(VENV)/bin/python -m benchmarks.set_index --json benchmarks/results/set_index.json
	$(VENV)/bin/python -m benchmarks.rechunk --json benchmarks/results/rechunk.json
	$(VENV)/bin/python -m benchmarks.memory --json benchmarks/results/memory.json
	$(VENV)/bin/python -m benchmarks.codecs --json benchmarks/results/codecs.json
	$(VENV)/bin/python -m benchmarks.tiers --repeats 1 --json benchmarks/results/tiers.json

# `python -m venv` needs Debian's python3-venv; where it is missing, virtualenv from pip will do.
define make_venv
	test -x $(1)/bin/python || $(2) -m venv $(1) || \
	    ($(2) -m pip install --user --break-system-packages virtualenv && \
	     $(2) -m virtualenv $(1))
	$(1)/bin/python -m pip install --quiet --upgrade pip
endef

# The package is installed, not linked: Dask finds its defaults under the environment's prefix,
# where only an installation puts them. All environments install one wheel, so they can be made side
# by side (`make -j environments`); builds in this folder at the same time would disturb each other.
WHEEL := build/wheel/made

$(VENV)/bin/python:
	$(call make_venv,$(VENV),$(PYTHON))

$(WHEEL): $(SOURCES) | $(VENV)/bin/python
	rm -rf build/bdist.* build/lib build/wheel
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	touch $@

# $(call install,environment,version of dask,extras)
define install
	$(1)/bin/python -m pip install --quiet \
	    "dask[dataframe]==$(2)" "distributed==$(2)" "$$(echo build/wheel/dask_gpurt*.whl)$(3)"
	$(1)/bin/python -m pip install --quiet --no-deps --force-reinstall build/wheel/dask_gpurt*.whl
endef

# UCX is in the first one alone: what it is built for pins Dask to that version. So are the operator for
# Kubernetes, the driver of a browser, and Torch for CPUs, for their size: more than 1 GB on the disk.
# Indexes without such a build of Torch have one of several gigabytes, which is not fetched.
$(VENV)/installed: $(WHEEL)
	$(call install,$(VENV),$(OLDEST),[test$(comma)ucx$(comma)kubernetes-test$(comma)browser-test])
	$(VENV)/bin/python -m pip install --quiet "torch==$(TORCH)" || \
	    echo "no torch for CPUs here: its tests are skipped" >&2
	touch $@

$(VENV_NEWEST)/installed: $(WHEEL)
	$(call make_venv,$(VENV_NEWEST),$(NEWEST_PYTHON))
	$(call install,$(VENV_NEWEST),$(NEWEST),[test])
	touch $@

$(VENV_FLOOR)/installed: $(WHEEL)
	$(call make_venv,$(VENV_FLOOR),$(PYTHON))
	$(VENV_FLOOR)/bin/python -m pip install --quiet $(FLOOR)
	$(call install,$(VENV_FLOOR),$(OLDEST),[test])
	touch $@

$(VENV_THIRDPARTY)/installed: $(WHEEL)
	$(call make_venv,$(VENV_THIRDPARTY),$(PYTHON))
	$(call install,$(VENV_THIRDPARTY),$(OLDEST),[test$(comma)thirdparty])
	touch $@

$(VENV_OTHER)/installed: $(WHEEL)
	$(call make_venv,$(VENV_OTHER),$(OTHER_PYTHON))
	$(call install,$(VENV_OTHER),$(OLDEST),)
	touch $@

# CuPy for AMD's GPUs is 74 MB to fetch, and 380 MB on the disk.
$(VENV_HIP)/installed: $(WHEEL)
	$(call make_venv,$(VENV_HIP),$(PYTHON))
	$(call install,$(VENV_HIP),$(OLDEST),[test])
	$(VENV_HIP)/bin/python -m pip install --quiet "cupy-rocm-7-0==$(CUPY_ROCM)" || \
	    echo "no CuPy for AMD's GPUs here: its tests are skipped" >&2
	touch $@

# The engines that `python -m benchmarks.peers` compares with. It skips those that cannot be installed.
PEERS := benchmarks/peers/requirements.txt
$(VENV_PEERS)/installed: $(PEERS)
	$(call make_venv,$(VENV_PEERS),$(PYTHON))
	grep -v '^#' $(PEERS) | while read -r one; do \
	    $(VENV_PEERS)/bin/python -m pip install --quiet "$$one" </dev/null || \
	        echo "$$one cannot be installed here: it is skipped" >&2; \
	done
	touch $@

# The site reads the package from this folder; the wheel brings what it needs.
$(VENV_DOCS)/installed: setup.cfg pyproject.toml | $(WHEEL)
	$(call make_venv,$(VENV_DOCS),$(PYTHON))
	$(VENV_DOCS)/bin/python -m pip install --quiet "$$(echo build/wheel/dask_gpurt*.whl)[docs]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV_NEWEST) $(VENV_THIRDPARTY) $(VENV_OTHER) $(VENV_DOCS) $(VENV_HIP) $(VENV_FLOOR) \
	    $(VENV_PEERS) \
	    build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache docs/_build htmlcov .coverage
