# The commands of a checkout. `make demo` and `make test` set up everything they need themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Modules are compiled at their first import: few of torch's and JAX's ever are. But once, not again
# by each of the many processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/pip install -qq --no-compile
# ccache's own default evicts too late to matter, but a full disk would.
export CCACHE_MAXSIZE ?= 5G
# What one build folder compiled serves the others; and a first build needs no preprocessor twice.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
export CCACHE_DEPEND := 1

# The demo compiles CUDA code only where it could run.
GPU := $(wildcard /dev/nvidiactl /dev/dxg)
DEMO_CUDA := $(if $(GPU),AUTO,OFF)

.PHONY: help demo test test-softgpu wheel bench format clean packages-demo packages-test

help:
	@echo "make demo    build, check every op against its reference, write a passage, measure a little"
	@echo "make test    everything a change must pass"
	@echo "make test-softgpu  the CUDA kernels on a GPU in software, in several orders"
	@echo "make bench   the full benchmark beside the peers that are installed"
	@echo "make wheel   a wheel in dist/"
	@echo "make format  clang-format and ruff over the sources"
	@echo "make clean   removes what was built (and keeps .venv)"

packages-demo packages-test: packages-%:
	@scripts/packages.sh $*

# pip, which comes last: without it the environment was left half made.
$(BIN)/pip:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: scripts/requirements-demo.txt | packages-demo $(BIN)/pip
	@echo "Python packages for the demo, into $(VENV)"
	@$(PIP_INSTALL) -r $<
	@touch $@

$(VENV)/test.stamp: scripts/requirements-test.txt scripts/requirements-demo.txt | packages-test $(BIN)/pip
	@echo "Python packages for the tests, into $(VENV) (torch and JAX among them)"
	@$(PIP_INSTALL) -r $<
	@touch $@ $(VENV)/demo.stamp

$(BIN)/pip: | packages-demo

demo: $(VENV)/demo.stamp
	@scripts/wheel.sh $(BIN)/python $(DEMO_CUDA)
	@echo; $(BIN)/fk info
	@echo; $(BIN)/fk check
	@echo; $(BIN)/fk generate -n 100 --seed 2
	@echo; $(BIN)/fk bench --quick --framework numpy demo

test: $(VENV)/test.stamp
	@scripts/test.sh

test-softgpu: $(VENV)/test.stamp
	@scripts/test.sh build softgpu softgpu_more

wheel: $(VENV)/demo.stamp
	@scripts/wheel.sh $(BIN)/python AUTO

bench: $(VENV)/test.stamp
	@scripts/wheel.sh $(BIN)/python AUTO
	@$(BIN)/fk bench

format: $(VENV)/test.stamp
	@sources=$$(scripts/sources.sh) && $(BIN)/clang-format -i $$sources
	@$(BIN)/ruff check -q --fix . ; failed=$$? ; $(BIN)/ruff format -q . && exit $$failed

clean:
	rm -rf build build-* dist
