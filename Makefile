# Every target sets up .venv when it is missing or when setup.py has changed; nothing needs an activated environment.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready

# Tests of pure functions and files, and the pipeline under torchrun: what a change breaks first.
QUICK := tests/config tests/weights tests/plan tests/model tests/formats tests/parallel \
	tests/test_placement.py tests/test_batch.py tests/test_layering.py tests/test_architecture.py

# Two files of tests at a time; most start processes of their own, so more would only wait for each other.  In the order
# of their names: by the number of their tests, the long ones would come last, and one alone at the end.  A test process
# that dies ends the run and names its test: with loadfile, xdist waits for ever after it has replaced one.
TWO_AT_A_TIME := --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo test quick lint clean

demo: $(READY)
	$(RUN) -m demo.run

test: $(READY)
	$(RUN) -m pytest $(TWO_AT_A_TIME)

quick: $(READY)
	$(RUN) -m pytest $(TWO_AT_A_TIME) $(QUICK)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m basedpyright

# torch comes first and by exact version, so that setup.py's range is met already and never pulls another build.  Where
# a CPU build is at hand (a wheel folder or index that pip is set up with) pip takes it.  torchvision lies beside the
# other packages: it has no CPU build on PyPI, and transformers behaves otherwise where it finds it.  One test asks it.
$(READY): setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision torchvision==0.28.0
	@touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
