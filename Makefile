PYTHON ?= python3

.PHONY: tree refresh
tree:
	@$(PYTHON) scripts/upstream.py tree
refresh:
	@$(PYTHON) scripts/upstream.py refresh
