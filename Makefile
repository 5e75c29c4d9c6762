# Every target sets up .venv when it is missing or when setup.py or requirements.lock has changed; nothing needs an
# activated environment.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
UV := $(VENV)/lock/bin/uv

# Tests of pure functions and files, and the pipeline under torchrun: what a change breaks first.
QUICK := tests/config tests/weights tests/plan tests/model tests/checkpoint tests/parallel \
	tests/test_placement.py tests/test_batch.py tests/test_layering.py

# Two files of tests at a time; most start processes of their own, so more would only wait for each other.  In the order
# of their names: by the number of their tests, the long ones would come last, and one alone at the end.  A test process
# that dies ends the run and names its test: with loadfile, xdist waits for ever after it has replaced one.
TWO_AT_A_TIME := --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo test quick lint site lock test-versions clean

demo: $(READY)
	$(RUN) -m demo.run

test: $(READY)
	$(RUN) -m pytest $(TWO_AT_A_TIME)

quick: $(READY)
	$(RUN) -m pytest $(TWO_AT_A_TIME) $(QUICK)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m basedpyright

# The documentation in English and Chinese, into build/site.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --config-file site/mkdocs.yml
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --config-file site/mkdocs.zh.yml

# The lock holds the exact version of each package and the hashes of its files for all platforms, so pip refuses a file
# that was exchanged, whatever index it comes from.  torch and torchvision are locked by version only: the files of their
# CPU builds have other hashes on each index, and where a CPU build is at hand (a wheel folder or index that pip is set up
# with) pip takes it.  setup.py's range is met by then and never pulls another build.  torchvision lies beside the other
# packages: it has no CPU build on PyPI, and transformers behaves otherwise where it finds it.  One test asks it.
$(READY): setup.py requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes --requirement requirements.lock
	$(PIP) torch==2.13.0
	$(PIP) --no-build-isolation --editable '.[test]'
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	@touch $@

$(UV):
	$(PYTHON) -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check uv

# The combinations of versions in tests/versions, or those that ONLY names, each in an environment of its own.
test-versions: $(READY) $(UV)
	$(RUN) -m tests.versions --uv $(UV) $(ONLY)

# After a change of setup.py and of what is installed: writes the lock of all that is installed.
lock: $(UV)
	$(RUN) -m pip freeze --all --exclude-editable \
		| sed "/^torch/d; /^pip==/d; s/^decord==.*/&; platform_machine == 'x86_64'/" \
		| $(UV) pip compile - --universal --python-version 3.11 --no-deps --generate-hashes --no-header \
			--no-annotate --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) build runs .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
