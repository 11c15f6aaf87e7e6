PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(READY)  ## train a small ELECTRA on the documentation on this machine and show what it learned
	$(BIN)/electra quickstart

test: $(READY)  ## all tests that take seconds (make test-slow: the others)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' tests/test_docs.py tests

test-slow: $(READY)  ## the slow tests: a hundred kills, 200,000 steps, tokenizers of other languages, the quickstart itself
	$(BIN)/python -m pytest -m slow

test-browser: $(READY)  ## the page of electra serve in a real browser: every view at three widths, light and dark
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { apt-get install -qy chromium chromium-driver >/dev/null 2>&1 \
	  || sudo -n apt-get install -qy chromium chromium-driver >/dev/null 2>&1 || echo 'no browser, and none could be installed: the tests will be skipped'; }
	$(BIN)/python -m pytest -rs tests/inspector/test_browser.py

test-faults: $(READY)  ## every fault of tests/faults, 2,000 mutations of each kind of file
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/faults --ignore tests/faults/test_kills.py --ignore tests/faults/test_long_run.py

sbom: $(READY)  ## sbom.json: every installed package with its version and licence, as CycloneDX
	$(BIN)/python bench/sbom.py > sbom.json

audit: $(READY)  ## known vulnerabilities of the pinned packages, where the index answers
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt pip-audit 2>/dev/null || true
	$(BIN)/python bench/audit.py

lint: $(READY)  ## ruff check and ruff format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# of the scripts in bench only what tells that they no longer fit the code
BENCH_TYPES := --allow-untyped-defs $(addprefix --disable-error-code ,arg-type assignment import-not-found import-untyped misc \
  operator return-value union-attr var-annotated)

types: $(READY)  ## mypy
	$(BIN)/mypy
	MYPYPATH=src:bench $(BIN)/mypy bench --exclude original_ $(BENCH_TYPES)

bench: $(READY)  ## the measurements behind docs/evidence.md that run on this machine
	$(BIN)/python bench/throughput.py --case small:8x128 --variants electra transformers --block 1
	$(BIN)/python bench/prepare_speed.py

docs: $(READY)  ## check that the links between the pages lead somewhere
	$(BIN)/python -m pytest tests/test_docs.py

site: $(READY)  ## the pages as a site in site/html, with every link and anchor checked
	$(BIN)/python docs/site.py

.PHONY: help quickstart test test-slow test-browser test-faults sbom audit lint types bench docs site
.DEFAULT_GOAL := help
