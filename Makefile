# make train [ARGS="--section.key value ..."]   install on first use, train the default model, write its report
# make test                                     install on first use, then lint, rooms, types and tests
# make test-extras                              what needs a browser (Debian's chromium), trackers, lm-eval or a notebook;
#                                               and that every extra of pyproject.toml installs
# make docs                                     install on first use, then build the pages of docs/ as a site, in .site
# make docs-serve [PORT=8000]                   show them at http://127.0.0.1:8000, with a search
# make test-full                                then planted faults, kill points, damaged bytes, pairs of layouts, random kills
# make test-oldest                              the tests on the oldest torch that pyproject.toml allows, in a venv of 5 GB
# make mutants ARGS="--only ops/loss.py"        small changes of one module that no test of it notices (tools/mutants.py)
# make bench [ARGS="--only step"]               speed beside other programs: prints a table, writes benchmarks.json and .png
PYTHON ?= python3
PORT ?= 8000

OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\(.*\)".*/\1/p' pyproject.toml)

# Tests start some hundred processes: without bytecode each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test types tests docs docs-serve site notebook test-extras test-full test-oldest mutants bench

train: .venv/installed
	.venv/bin/python train.py --config bloom.toml $(ARGS)
	.venv/bin/dtmega report "$$(.venv/bin/python -c '$(RUN_DIR)' --config bloom.toml $(ARGS))"

RUN_DIR = import sys; from dtmega import config; print(config.load(sys.argv[1:]).run.dir)

# The types beside the tests: where both cores are not busy, they are at the tests' beginning and end.
test: .venv/installed-test
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-cache
	$(MAKE) --no-print-directory -j 2 site types tests

types:
	.venv/bin/basedpyright

# A broken link or anchor fails, and so does a link to a folder, which a browser lists where the pages are on a disk.
site:
	NO_COLOR=1 .venv/bin/zensical build --strict > .site.log 2>&1 || { cat .site.log; exit 1; }
	@! grep -oHE 'href="[^":]*/(#[^"]*)?"' .site/[a-z]*.html

docs: .venv/installed-test site
	@echo "open $(CURDIR)/.site/index.html, or for the search, too: make docs-serve"

# Until Ctrl-C, on this machine only. A browser lets no page of a disk search; a page that changes is built again.
docs-serve: .venv/installed-test
	.venv/bin/zensical serve --dev-addr 127.0.0.1:$(PORT)

# Run the cells of examples/one_gpu.py and write the notebook beside it.
notebook: .venv/installed-test
	.venv/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[notebook]'
	.venv/bin/python tools/notebook.py

tests:
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-extras: .venv/installed-extras
	.venv/bin/python tools/check_extras.py
	.venv/bin/pytest tests/report/test_page.py tests/report/test_browser.py tests/training/test_trackers.py tests/inference/test_lm_eval_harness.py \
		tests/test_notebook.py

test-full: test
	.venv/bin/pytest -n 2 --dist worksteal -m full
	.venv/bin/python tests/planted.py
	.venv/bin/python tests/hf_sweep.py
	.venv/bin/python benchmarks/faults.py
	.venv/bin/python benchmarks/resume.py
	.venv/bin/python benchmarks/kills.py

# What constraints.txt says of torch, of setuptools and of the libraries that come with it is of a newer one.
test-oldest:
	$(PYTHON) -m venv .venv-oldest
	grep -vE '^(torch|triton|setuptools|nvidia-[a-z0-9-]*|cuda-[a-z]*)==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --disable-pip-version-check -c .venv-oldest/constraints.txt \
		'torch==$(OLDEST_TORCH).*' -e '.[test]'
	.venv-oldest/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

mutants: .venv/installed-test
	.venv/bin/pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[mutants]'
	.venv/bin/python tools/mutants.py $(ARGS)

bench: .venv/installed-bench
	.venv/bin/python -m benchmarks $(ARGS)

# Named, because make would cut them at their commas where they stand.
BENCH_EXTRAS = bench,report
TEST_EXTRAS = browser,eval,mlflow,notebook,png,s3,test,trackio,wandb

# A stamp, newer than what it was made from, makes the second call instant; a killed install leaves none.
.venv/installed: pyproject.toml constraints.txt
	$(call install,.[report])
	touch $@

# To compile all of torch and transformers takes a minute; what the tests import is compiled as they import it.
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
