# Every target sets up .venv when it is missing or when setup.py has changed; nothing needs an activated environment.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready

.PHONY: demo test lint clean

demo: $(READY)
	$(RUN) -m demo.run

test: $(READY)
	$(RUN) -m pytest

lint: $(READY)
	$(RUN) -m ruff check .

# The CPU build of torch comes first and by exact version, so that setup.py's range is met already and never pulls the
# gigabytes of a CUDA build.  PyTorch's own index serves it where no configured index or wheel folder does.
$(READY): setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
	$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build runs .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
