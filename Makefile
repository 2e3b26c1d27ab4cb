# make demo, make test: both work on a fresh machine with Python >= 3.10, gcc, git and make, and both make .venv themselves.
#
# The package is never installed in editable form: what runs and what is tested is the wheel, built by way of the source
# archive, so a file missing from either is found here. Stamps in .venv say which step is done; a step runs again when
# a file it depends on is newer.

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=
# Another torch than the pinned one: `make test TORCH=2.14.1` works in .venv-2.14.1.
TORCH ?=

VENV := .venv$(TORCH:%=-%)
PINS := $(if $(TORCH),$(VENV)/,)constraints.txt
BIN := $(VENV)/bin
# Without --no-compile pip compiles thousands of files that nobody imports, for longer than it downloads.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
WHEEL := $$(echo dist/*.whl)

# Folders are named as well as files: a deleted file makes its folder newer.
SOURCES := $(shell find src -not -name '__pycache__' -not -name '*.pyc') pyproject.toml README.md LICENSE tools/hatch_readme.py

# A source tree on PYTHONPATH would hide the wheel.
unexport PYTHONPATH
# Tests start dozens of processes; what the first has compiled of torch and of ours serves the others.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all house matrix quick faults test-gpu browser lint types wheel release-tools release-check bench bench-discard bench-frontier docs pages first-minutes clean
.DELETE_ON_ERROR:
# Steps share one .venv.
.NOTPARALLEL:

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.stamp-installed  ## train a small GPT with and without recomputation, and with a plan, and compare
	@echo "Training a small GPT five ways; figures follow in a table ..."
	$(BIN)/torch-recompute demo

test: lint types $(VENV)/.stamp-installed browser  ## lint, type check, and all but the nightly tests, against the installed wheel
	OMP_NUM_THREADS=1 TORCH_RECOMPUTE_TEST_INSTALLED=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not nightly" --timeout 300 -q -r s $(PYTEST_ARGS)

test-all: $(VENV)/.stamp-installed $(VENV)/.stamp-dev browser  ## all tests, planted faults and the age of results: a line each; ARGS="WORD" for some
	$(BIN)/python tools/test_all.py --jobs $(JOBS) $(ARGS)

house: $(VENV)/.stamp-venv  ## the sizes of rooms, files and functions, for whoever wants to look
	@$(BIN)/python tools/house.py

matrix: $(VENV)/.stamp-base  ## the tests under torch 2.11 to the newest, each in an environment of its own: ARGS="2.11.0 --save"
	$(BIN)/python tools/matrix.py --jobs $(JOBS) $(ARGS)

# On the sources, with no build between. Types are checked for what differs from the last commit.
quick: $(VENV)/.stamp-dev  ## in under a minute: lint, types of changed files, and the laws of a region
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell
	@changed=$$(git diff --name-only --diff-filter=d HEAD -- 'src/*.py'); \
	if [ -n "$$changed" ]; then $(BIN)/pyright --pythonpath $(BIN)/python $$changed; fi
	OMP_NUM_THREADS=1 PYTHONPATH=src $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not nightly" -q tests/laws $(PYTEST_ARGS)

# Rows say something of the tests only if their authors have not read them.
faults: $(VENV)/.stamp-dev  ## one-line faults, and the test that catches each: ARGS="--list"
	$(BIN)/python tools/plant_faults.py --jobs $(JOBS) $(ARGS)

test-gpu: $(VENV)/.stamp-installed $(VENV)/.stamp-dev  ## what only a CUDA device can prove, in a table
	$(BIN)/python tests/gpu_checks.py $(if $(SAVE),--save $(SAVE))

# Tried again each time until it is there. Without it a browser on the path serves; without either, tests are skipped.
browser: $(VENV)/.stamp-dev  ## the pinned Chromium that tests look at pages with, into .venv
	@test -e $(VENV)/.stamp-browser -a $(VENV)/.stamp-browser -nt tools/get_browser.py || \
	if $(BIN)/python tools/get_browser.py $(VENV)/browser; then touch $(VENV)/.stamp-browser; \
	else echo 'Tests in a browser take one on the path, or are SKIPPED.' >&2; fi

lint: $(VENV)/.stamp-dev  ## ruff check, ruff format --check, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

# Both at once, each on a core of its own; the first line fetches what both run on.
types: $(VENV)/.stamp-dev  ## pyright: strict on src, basic on benchmarks and tools
	@$(BIN)/pyright --version
	@$(BIN)/pyright --pythonpath $(BIN)/python & src=$$!; \
	$(BIN)/pyright --pythonpath $(BIN)/python -p benchmarks; others=$$?; wait $$src && exit $$others

wheel: $(VENV)/.stamp-wheel  ## the source archive and the wheel, in dist

# In an environment of its own, which needs Python 3.11 or newer and no torch.
release-tools: .venv-release/.stamp

release-check: release-tools  ## all of a release but the upload, into release, and a table of what passed
	.venv-release/bin/python tools/release_check.py $(ARGS)

bench: $(VENV)/.stamp-installed $(VENV)/.stamp-dev  ## every file of benchmarks, one after the other
	@set -e; for file in $(sort $(wildcard benchmarks/[a-z]*.py)); do echo "== $$file"; $(BIN)/python $$file; done

bench-discard: $(VENV)/.stamp-installed $(VENV)/.stamp-dev  ## outputs that are discarded, beside peers; its options: ARGS="--check"
	$(BIN)/python benchmarks/peers discard $(ARGS)

bench-frontier: $(VENV)/.stamp-installed $(VENV)/.stamp-dev  ## every peer at every setting, beside our plans; ARGS as above
	$(BIN)/python benchmarks/peers frontier $(ARGS)

docs: $(VENV)/.stamp-docs  ## the manual, into site (Python 3.11 or newer)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; the search needs a server: python3 -m http.server -d site"

pages: $(VENV)/.stamp-installed $(VENV)/.stamp-dev  ## what in docs is made from results and drawings
	$(BIN)/python tools/pages.py

first-minutes: $(VENV)/.stamp-dev browser  ## follow the quick start in an empty folder, and write its outputs, times and pictures
	$(BIN)/python tools/first_minutes.py $(ARGS)

clean:  ## remove every .venv and everything built
	rm -rf .venv .venv-* dist build site release test-all .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	touch $@

.venv-release/.stamp: tools/release-tools.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "The tools of a release need Python 3.11: make release-check PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt -r tools/release-tools.txt
	touch $@

# Releases of torch ask for different ranges of setuptools.
$(VENV)/constraints.txt: constraints.txt | $(VENV)/.stamp-venv
	sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d' $< > $@

# `torch` is asked for by that one name and the constraint, so that pip may choose the build that suits the machine.
$(VENV)/.stamp-base: $(PINS) $(VENV)/.stamp-venv
	@echo "Installing torch into $(VENV): a few hundred megabytes, once ..."
	$(INSTALL) -c $(PINS) torch hatchling build
	touch $@

$(VENV)/.stamp-wheel: $(SOURCES) $(VENV)/.stamp-base
	@echo "Building the source archive and, from it, the wheel ..."
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . > $(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	touch $@

# The extras follow pyproject.toml, the package follows its sources: two stamps, so that an edit reinstalls only the package.
$(VENV)/.stamp-extras: pyproject.toml $(PINS) | $(VENV)/.stamp-wheel
	@echo "Installing the wheel, numpy and rich ..."
	$(INSTALL) -c $(PINS) "$(WHEEL)[cli]"
	touch $@

$(VENV)/.stamp-installed: $(VENV)/.stamp-wheel $(VENV)/.stamp-extras
	$(INSTALL) --no-deps --force-reinstall $(WHEEL)
	touch $@

$(VENV)/.stamp-dev: pyproject.toml $(PINS) | $(VENV)/.stamp-wheel
	$(INSTALL) -c $(PINS) "$(WHEEL)[cli,dev]"
	touch $@

$(VENV)/.stamp-docs: pyproject.toml $(PINS) | $(VENV)/.stamp-wheel
	@$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "The tools of the manual need Python 3.11: make clean, then make docs PYTHON=/path/to/python3.11")'
	$(INSTALL) -c $(PINS) "$(WHEEL)[docs]"
	touch $@
