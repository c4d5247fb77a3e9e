# make train [ARGS="--section.key value ..."]   install on first use, train the default model, write its report
# make test                                     install on first use, then linters, types, pages and tests
# make test-extras                              tests that need a browser (Debian's chromium), trackers, lm-eval, a
#                                               notebook, Ray or megatron-core; and check that every extra of
#                                               pyproject.toml installs
# make docs                                     install on first use, then build the pages of docs/ as a site, in .site
# make docs-serve [PORT=8000]                   serve the site at http://127.0.0.1:8000, with a search
# make test-full                                make test, then planted faults, kill points, damaged bytes, pairs of
#                                               layouts, random kills
# make test-oldest                              run the tests with the oldest torch that pyproject.toml allows (5 GB)
# make test-torch TORCH=2.14.1                  run the tests with another version of torch, in .venv-torch-2.14.1 (5 GB)
# make mutants ARGS="--only ops/optim/rates.py"       find small changes of one module that no test notices (tools/mutants.py)
# make bench [ARGS="--only step"]               compare speed with other programs: a table, benchmarks.json and .png
PYTHON ?= python3
PORT ?= 8000

OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\(.*\)".*/\1/p' pyproject.toml)
TORCH_VENV = .venv-torch-$(TORCH)

# Tests start hundreds of processes. Without bytecode files each would compile everything that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test types tests docs docs-serve site notebook test-extras test-full test-oldest test-torch mutants bench

train: .venv/installed
	.venv/bin/python train.py --config bloom.toml $(ARGS)
	.venv/bin/dtmega report "$$(.venv/bin/python -c '$(RUN_DIR)' --config bloom.toml $(ARGS))"

RUN_DIR = import sys; from dtmega import config; print(config.load(sys.argv[1:]).run.dir)

# Types and pages are checked in parallel with the tests, which do not keep both cores busy at their start and end.
test: .venv/installed-test
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-cache
	$(MAKE) --no-print-directory -j 2 site types tests

types:
	.venv/bin/basedpyright

# A broken link or anchor is an error. So is a link to a folder: opened from a disk, a browser would list its files.
site:
	NO_COLOR=1 .venv/bin/zensical build --strict > .site.log 2>&1 || { cat .site.log; exit 1; }
	@! grep -oHE 'href="[^":]*/(#[^"]*)?"' .site/[a-z]*.html

docs: .venv/installed-test site
	@echo "open $(CURDIR)/.site/index.html, or for the search, too: make docs-serve"

# Runs until Ctrl-C, for this machine only, and rebuilds changed pages. The search needs a server: browsers do not let a
# page on a disk load its index.
docs-serve: .venv/installed-test
	.venv/bin/zensical serve --dev-addr 127.0.0.1:$(PORT)

# Run the cells of examples/one_gpu.py and write examples/one_gpu.ipynb with their output.
notebook: .venv/installed-test
	.venv/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[notebook]'
	.venv/bin/python tools/notebook.py

tests:
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-extras: .venv/installed-extras
	.venv/bin/python tools/check_extras.py
	.venv/bin/pytest tests/report/test_page.py tests/report/test_browser.py tests/training/records/test_trackers.py tests/inference/test_lm_eval_harness.py \
		tests/launch tests/test_notebook.py tests/interop/megatron/test_core_ranks.py

test-full: test
	.venv/bin/pytest -n 2 --dist worksteal -m full
	.venv/bin/python tests/planted.py
	.venv/bin/python tests/hf_sweep.py
	.venv/bin/python benchmarks/faults.py
	.venv/bin/python benchmarks/resume.py
	.venv/bin/python benchmarks/kills.py

test-oldest:
	$(MAKE) --no-print-directory test-torch TORCH='$(OLDEST_TORCH).*' TORCH_VENV=.venv-oldest

# constraints.txt pins one torch, with its setuptools and CUDA libraries; those lines are left out here.
test-torch:
	@test -n "$(TORCH)" || { echo "name a version of torch: make test-torch TORCH=2.14.1"; exit 1; }
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|triton|setuptools|nvidia-[a-z0-9-]*|cuda-[a-z]*)==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt \
		'torch==$(TORCH)' -e '.[test]'
	$(TORCH_VENV)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

mutants: .venv/installed-test
	.venv/bin/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[mutants]'
	.venv/bin/python tools/mutants.py $(ARGS)

bench: .venv/installed-bench
	.venv/bin/python -m benchmarks $(ARGS)

# Variables, because make would split the lists at their commas inside $(call ...).
BENCH_EXTRAS = bench,report
TEST_EXTRAS = bench,browser,eval,kubeflow,mlflow,notebook,ray,s3,test,trackio,wandb

# A stamp file that is newer than its sources makes the second call instant. A killed install leaves no stamp.
.venv/installed: pyproject.toml constraints.txt
	$(call install,.[report])
	touch $@

# --no-compile: compiling all of torch and transformers takes a minute, and Python compiles what tests import anyway.
.venv/installed-test: pyproject.toml constraints.txt
	$(call install,.[test],--no-compile)
	touch .venv/installed $@

.venv/installed-bench: pyproject.toml constraints.txt
	$(call install,.[$(BENCH_EXTRAS)])
	touch .venv/installed $@

.venv/installed-extras: pyproject.toml constraints.txt
	$(call install,.[$(TEST_EXTRAS)],--no-compile)
	touch .venv/installed .venv/installed-test $@

define install
@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	"dtmega needs Python >= 3.10, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.11")'
$(PYTHON) -m venv .venv
.venv/bin/pip install --disable-pip-version-check $(2) -c constraints.txt -e '$(1)'
endef
