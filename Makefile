# make run    set up .venv, pack the embedded checkpoint, write a Python function, build the book
# make test   the same set-up, then every test and every notebook
#
# PYTHON picks the interpreter (3.10 to 3.13), VENV the folder of the environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
BOOK := $(BIN)/jupyter-book build . --warningiserror --keep-going

.PHONY: run test setup book notebooks receipts lock clean help

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

run: setup book  ## generate text with the embedded checkpoint and build the book
	@$(BIN)/nanoqwen run
	@echo "The book: $(CURDIR)/_build/html/index.html"

test: setup book  ## unit, layer and graph tiers, command line, book checks, notebooks
	$(BIN)/python -X warn_default_encoding -m pytest -n auto --dist loadfile
	$(BIN)/python -m pytest --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg notebooks

setup: $(READY)  ## create $(VENV) with the locked dependencies

$(READY): $(wildcard requirements/*.txt) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 14) else "nanoqwen needs Python 3.10 to 3.13, this is %d.%d: call make PYTHON=python3.12" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -r requirements/lock.txt
	$(PIP) install -q --no-deps -r requirements/vocab.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@extra=$$($(BIN)/python -m nanoqwen.doctor --cupy-extra); \
	if [ -n "$$extra" ]; then echo "NVIDIA driver found: installing the $$extra extra"; $(PIP) install -q -r requirements/$$extra.txt; \
	elif [ "$$(uname -s)" = Linux ]; then $(PIP) install -q --no-deps -r requirements/nvrtc.txt; fi
	@touch $(READY)

book: setup  ## build the book into _build/html; a warning is an error
	$(BIN)/python -m nanoqwen.book.build
	$(BOOK)

notebooks: setup  ## run every chapter again and store its outputs
	$(BIN)/python -m nanoqwen.book.execute

receipts: setup  ## measure again what is older than its sources (most of it needs a Hopper card)
	$(BIN)/python -m nanoqwen.bench.again

lock:  ## resolve requirements/lock.in again for Python 3.10 to 3.13 (needs uv)
	requirements/lock.sh

clean:  ## remove the environment and the built book
	rm -rf $(VENV) _build
