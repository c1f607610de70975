# Any of Python 3.11, 3.12, 3.13: upstream has wheels for these.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; \
	done || echo python3)
VENV := .venv/bin/python
ARGS ?=

.PHONY: help serve test soak check tree refresh wheel venv clean
help:
	@echo "make serve    set up, then serve the demo model with FLASHMAP on port 30000 (ARGS=\"--port 30001\")"
	@echo "make test     set up, then check the fork and run all tests (ARGS=\"-k tree\")"
	@echo "make soak     load and faults on real servers, ten minutes (ARGS=\"--minutes 30\")"
	@echo "make check    the fork's rules: patches, overlay, budget"
	@echo "make tree     build build/tree: upstream + patches + overlay"
	@echo "make refresh  write the commits of build/tree back to python/patches"
	@echo "make wheel    dist/sglang-*.whl"
	@echo "make venv     .venv, what serving needs"
	@echo "make clean    remove build, dist and .venv"

serve:
	@exec $(PYTHON) scripts/serve.py $(ARGS)

# One thread a process: the tests and the servers they start would spin in each other's barriers.
test:
	@$(PYTHON) scripts/setup_env.py --test
	@$(PYTHON) scripts/upstream.py check
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV) -m pytest test $(ARGS)

soak:
	@$(PYTHON) scripts/setup_env.py --test
	@$(VENV) test/soak/run_soak.py $(ARGS)

venv:
	@$(PYTHON) scripts/setup_env.py
check:
	@$(PYTHON) scripts/upstream.py check
tree:
	@$(PYTHON) scripts/upstream.py tree
refresh:
	@$(PYTHON) scripts/upstream.py refresh
wheel:
	@$(PYTHON) scripts/upstream.py wheel
clean:
	rm -rf build dist .venv
