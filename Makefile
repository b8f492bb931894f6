# Every target makes the environment it needs; a second run does not install again, unless
# pyproject.toml or constraints.txt changed. `make help` lists the targets.

PYTHON ?= python3
BACKEND ?= tensorflow
BACKENDS ?= tensorflow jax torch
# Test processes side by side, one thread each.
WORKERS ?= 2
PYTEST_ARGS ?=

INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS = pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format docs docs-pdf notebooks pictures clean

help:
	@echo "make demo [BACKEND=tensorflow|jax|torch]   train a small translator on made data and try it"
	@echo "make test [BACKENDS='tensorflow jax torch'] the quick tests, on one backend after another"
	@echo "make test-all                              the slow tests too"
	@echo "make lint                                  format, lint and types, without changing a file"
	@echo "make format                                format the code and mend what can be mended"
	@echo "make docs                                  build the site into site/"
	@echo "make docs-pdf                              print its annotated paper into site/keras-aiayn.pdf"
	@echo "make notebooks                             make notebooks/ of the pages again"
	@echo "make pictures [BACKEND=...]                draw the pictures of the site again"
	@echo "make clean                                 remove environments, caches and builds"
	@echo "PYTHON=python3.12 before or after any of them chooses the interpreter (3.11 to 3.13)."

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "make: '$(PYTHON)' is not Python 3.11, 3.12 or 3.13. Name one: make PYTHON=python3.11 ..." >&2; \
	  exit 1; }

COMMA := ,

# An environment is whole when its stamp is there: one without it is begun afresh.
# $(1) environment, $(2) extras
define environment
	@echo "Installing keras-aiayn[$(2)] into $(1): once, some minutes."
	@test -f $@ || { $(CHECK_PYTHON); $(PYTHON) -m venv --clear $(1); }
	@$(1)/bin/python $(INSTALL) --editable ".[$(2)]"
	@touch $@
endef

.venv/.installed: $(INPUTS)
	$(call environment,.venv,test$(COMMA)dev)

.venv-%/.installed: $(INPUTS)
	$(call environment,.venv-$*,$*$(COMMA)train$(COMMA)demo)

.venv-docs/.installed: $(INPUTS)
	$(call environment,.venv-docs,docs)

.venv-pdf/.installed: $(INPUTS)
	$(call environment,.venv-pdf,pdf)

# Kept between runs, though a pattern made them.
.PRECIOUS: .venv-%/.installed

ifneq (,$(filter demo pictures,$(MAKECMDGOALS)))
ifeq (,$(filter $(BACKEND),tensorflow jax torch))
$(error BACKEND must be tensorflow, jax or torch. Received: BACKEND=$(BACKEND))
endif
endif

RUN = @KERAS_BACKEND=$(BACKEND) TF_CPP_MIN_LOG_LEVEL=2 \
  JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv-jax/cache .venv-$(BACKEND)/bin/python

demo: .venv-$(BACKEND)/.installed
	$(RUN) examples/dates.py

# $(1) the target, $(2) pytest's choice of tests. All backends run, whichever fails.
define run_tests
	@trap 'exit 130' INT; failed=; \
	for backend in $(BACKENDS); do \
	  echo "== $$backend"; \
	  KERAS_BACKEND=$$backend TF_CPP_MIN_LOG_LEVEL=2 OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 \
	    JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.venv/jax-cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	    .venv/bin/python -m pytest -q -n $(WORKERS) $(2) $(PYTEST_ARGS) || failed="$$failed $$backend"; \
	done; \
	if [ -n "$$failed" ]; then echo "make $(1): failed on$$failed"; exit 1; fi; \
	echo "make $(1): passed on $(BACKENDS)"
endef

test: .venv/.installed
	$(call run_tests,test,-m "not slow")

test-all: .venv/.installed
	$(call run_tests,test-all,)

lint: .venv/.installed
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@echo "make lint: format, lint and types are in order"

format: .venv/.installed
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .
	@echo "make format: done"

docs: .venv-docs/.installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "make docs: site/index.html"

docs-pdf: docs .venv-pdf/.installed
	@.venv-pdf/bin/python docs/pdf.py
	@echo "make docs-pdf: site/keras-aiayn.pdf"

notebooks:
	@$(CHECK_PYTHON)
	@$(PYTHON) docs/notebooks.py
	@echo "make notebooks: notebooks/ is what the pages give"

pictures: .venv-$(BACKEND)/.installed
	$(RUN) docs/pictures.py
	@echo "make pictures: look at docs/pictures"

# What a run left (demo.keras, pictures, runs/) is the user's, and stays.
clean:
	@rm -rf .venv .venv-* build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "make clean: environments, caches and builds are gone"
