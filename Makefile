# `make demo` and `make test` are all that a newcomer needs; both install into
# .venv first. Exact versions come from constraints.txt.
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := test
# A constraint file of the user's own would fight with ours.
PIP := PIP_CONSTRAINT= $(BIN)/python -m pip --disable-pip-version-check
# Compiles the GPU kernels for the tests, without a GPU. Apart from the rest,
# since without a GPU the plugin greets every JAX process with a traceback.
COMPILER := .venv-compile
COMPILER_PACKAGES := jax jaxtyping jax-cuda13-pjrt jax-cuda13-plugin \
  nvidia-cuda-nvcc jax-triton triton
# Workers share the cores: more threads than cores only adds switching.
TEST_WORKERS ?= 2
BEGAN := $(shell date +%s)

.PHONY: demo demo-midtrain test lint format lock clean

# Each demo is a run of its own; the prepared corpus stays.
demo: $(VENV)/installed
	.ci/bubblewrap.sh
	rm -rf runs/demo/code/checkpoints runs/demo/drills/checkpoints runs/demo/rl
	$(BIN)/python launch/demo.py --workdir=runs/demo --began=$(BEGAN)

# Mid-training alone, for twice as long; beside a bigram model.
demo-midtrain: $(VENV)/installed
	rm -rf runs/midtrain/checkpoints
	$(BIN)/python launch/demo_midtrain.py \
	  --config=configs/midtrain_tiny.py:demo --workdir=runs/midtrain \
	  --began=$(BEGAN)

# The plugin exists for Linux alone; elsewhere its tests are skipped.
test: lint $(if $(filter Linux,$(shell uname)),$(COMPILER)/installed)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist=worksteal \
	  --jaxtyping-packages=composer_jax,pallas_kernels,beartype.beartype

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	python=$$(.ci/python.sh) && $$python -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

$(COMPILER)/installed: Makefile constraints.txt
	python=$$(.ci/python.sh) && $$python -m venv --clear $(COMPILER)
	PIP_CONSTRAINT= $(COMPILER)/bin/python -m pip --disable-pip-version-check \
	  install --quiet -c constraints.txt $(COMPILER_PACKAGES)
	touch $@

# Writes constraints.txt anew from the newest versions that fit pyproject.toml.
lock:
	python=$$(.ci/python.sh) && $$python -m venv --clear .lock
	.lock/bin/python -m pip install --quiet -e ".[$(EXTRAS)]" \
	  $(COMPILER_PACKAGES)
	.lock/bin/python -m pip freeze --exclude-editable > constraints.txt
	rm -rf .lock

clean:
	rm -rf $(VENV) $(COMPILER) .lock .uv runs
