# Every target installs what it needs: Python packages into .venv, OpenCode and ripgrep into
# node_modules. Needed on the machine: Python 3.11 or later, make, and Node with npm or an OpenCode.

.DEFAULT_GOAL := help
.PHONY: help serve serve-cluster doctor demo-peers test test-programs test-fast kills chaos clients fuzz check docs screens screenshots record qualify bench bench-quick
SHELL := /bin/sh
.DELETE_ON_ERROR:

WORKSPACE ?= $(OPENCODE_WORKSPACE_ROOT)
OPEN ?=
ARGS ?=
KILLS ?= 40
SECONDS ?= 60
SEED ?= 11

# uv brings its own list of certificate authorities; the machine's may have one more.
export UV_SYSTEM_CERTS := 1
export UV_NATIVE_TLS := 1

UV := $(or $(shell command -v uv 2>/dev/null),$(CURDIR)/.tools/bin/uv)
PACKAGES := .venv/.installed
RUNTIME := .venv/.installed-to-serve
PROGRAMS := node_modules/.installed
TEST_PROGRAMS := node_modules/.installed-for-tests
SDK03 := .tools/a2a-sdk-0.3/.installed
CLIENTS := $(patsubst tests/clients/requirements/%.txt,.tools/clients/%/.installed,\
	$(wildcard tests/clients/requirements/*.txt))
BIN := $(CURDIR)/.venv/bin

# What make and this file set for their own programs is not for the agent's commands: a `make` that
# it runs would otherwise take over our flags.
WITHOUT_OURS := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u MAKEOVERRIDES -u MAKE_TERMOUT \
	-u MAKE_TERMERR -u UV_SYSTEM_CERTS -u UV_NATIVE_TLS

# Read when a recipe runs: before the first installation there is no such directory.
RIPGREP = $(shell echo $(CURDIR)/node_modules/@vscode/ripgrep-*/bin)
WITH_PROGRAMS = PATH="$(CURDIR)/node_modules/.bin:$(RIPGREP):$$PATH"

help:
	@echo 'make serve      start OpenCode and the service, with the demo model if no provider is set up'
	@echo '                WORKSPACE=directory  OPEN=1 (the console)  ARGS="flags of opencode-a2a serve"'
	@echo 'make serve-cluster  start two replicas, two OpenCodes and a PostgreSQL; ARGS="--port 8000"'
	@echo 'make doctor     check what the service needs'
	@echo 'make demo-peers start two agents with the demo model, one of which asks the other'
	@echo 'make test       run all tests, with a real OpenCode and a real browser'
	@echo 'make test-fast  run the tests that need neither'
	@echo 'make kills      kill the service at random moments; KILLS=200 SEED=1'
	@echo 'make chaos      kill parts of a cluster at random and check what clients see; SECONDS=600 SEED=1'
	@echo 'make clients    record what people see in other clients; ARGS="litellm" runs only that one'
	@echo 'make check      check format, lint, types, direction of imports, generated pages'
	@echo 'make docs       write the generated pages'
	@echo 'make screens    update the terminal screens in tests/screens'
	@echo 'make screenshots  update the pictures of the console'
	@echo 'make bench      measure this and other servers, and write docs/performance.md (25 minutes)'
	@echo 'make bench-quick  measure for two minutes, and fail on a missed target'
	@echo 'make fuzz       send 100,000 mutated requests to the service; ARGS="--seed 1 --count 5000"'
	@echo 'make qualify    test VERSION=… of OpenCode, and record the result in docs/opencode.md'
	@echo 'make record     record event streams of the installed OpenCode into the test data'

# Only to serve, an OpenCode that is on the path already is as good as the one of package.json.
OWN_OPENCODE := $(shell command -v opencode 2>/dev/null)
SERVES = --auto-demo $(and $(WORKSPACE),--opencode-workspace-root "$(WORKSPACE)")

TO_SERVE := $(if $(wildcard $(RUNTIME)),,needed) $(RUNTIME) $(if $(OWN_OPENCODE),,$(PROGRAMS))

serve: $(TO_SERVE)
	@$(WITH_PROGRAMS) exec $(WITHOUT_OURS) $(BIN)/opencode-a2a serve $(SERVES) $(and $(OPEN),--open) $(ARGS)

serve-cluster: $(PACKAGES) $(PROGRAMS)
	@$(WITH_PROGRAMS) exec $(WITHOUT_OURS) $(BIN)/python -m tools.cluster \
		$(and $(WORKSPACE),--workspace "$(WORKSPACE)") $(ARGS)

doctor: $(TO_SERVE)
	@$(WITH_PROGRAMS) exec $(WITHOUT_OURS) $(BIN)/opencode-a2a doctor $(SERVES) $(ARGS)

demo-peers: $(PACKAGES) $(PROGRAMS)
	PATH="$(BIN):$(CURDIR)/node_modules/.bin:$(RIPGREP):$$PATH" $(BIN)/python tools/demo_peers.py $(ARGS)

# Many tests wait for an OpenCode: one process more than the two cores that they are planned for.
# The order is that of tests/conftest.py, which has the longest first. Three OpenCodes, browsers and
# databases can starve one another for longer than a test waits: what failed is tried alone.
IN_PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(if $(wildcard $(PACKAGES)),,needed) $(PACKAGES) $(TEST_PROGRAMS) $(SDK03)
	UV="$(UV)" $(WITH_PROGRAMS) $(BIN)/pytest $(IN_PARALLEL) $(ARGS) || \
		{ [ $$? -eq 1 ] && echo 'Repeating the failed tests one at a time.' && \
		UV="$(UV)" $(WITH_PROGRAMS) $(BIN)/pytest -v --last-failed --maxfail 3 $(ARGS); }

# What `test` installs; continuous integration does that while `check` runs.
test-programs: $(TEST_PROGRAMS) $(SDK03)

test-fast: $(PACKAGES)
	$(BIN)/pytest $(IN_PARALLEL) -m "not live and not browser" $(ARGS)

kills: $(PACKAGES) $(PROGRAMS)
	$(WITH_PROGRAMS) OPENCODE_A2A_TEST_KILLS=$(KILLS) OPENCODE_A2A_TEST_SEED=$(SEED) \
		$(BIN)/pytest -p no:xdist -v -k "service_is_killed or never_doubled" \
		tests/live/test_answers.py tests/live/test_durability.py tests/live/test_kills.py \
		tests/live/test_steering.py $(ARGS)

chaos: $(PACKAGES)
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

clients: $(PACKAGES) $(TEST_PROGRAMS) $(SDK03) $(CLIENTS)
	$(WITH_PROGRAMS) $(BIN)/python -m tests.clients $(ARGS)
	$(BIN)/python tools/docs.py

check: $(PACKAGES)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/pytest -q tests/test_architecture.py
	$(BIN)/python tools/docs.py --check

docs: $(PACKAGES)
	$(BIN)/python tools/docs.py

screens: $(PACKAGES) $(PROGRAMS)
	OPENCODE_A2A_WRITE_SCREENS=1 $(WITH_PROGRAMS) $(BIN)/pytest -q tests/live/test_screens.py tests/unit/test_screens.py

screenshots: $(PACKAGES) $(TEST_PROGRAMS)
	$(WITH_PROGRAMS) $(BIN)/python -m tools.screenshots

bench: $(PACKAGES)
	UV="$(UV)" $(BIN)/python -m bench $(ARGS)

bench-quick: $(PACKAGES)
	UV="$(UV)" $(BIN)/python -m bench --quick --check $(ARGS)

fuzz: $(PACKAGES)
	$(BIN)/python -m tools.fuzz $(ARGS)

record: $(PACKAGES) $(PROGRAMS)
	$(WITH_PROGRAMS) $(BIN)/python tools/record.py $(ARGS)

qualify: $(PACKAGES) $(PROGRAMS)
	$(WITH_PROGRAMS) $(BIN)/python tools/qualify.py $(or $(VERSION),$(error Say which version: make qualify VERSION=1.18.33))

$(PACKAGES): pyproject.toml uv.lock | $(UV)
	@tools/step 'Python packages for development' $(UV) sync --frozen --quiet
	@touch $(RUNTIME) $@

# What the service needs itself; what is installed for development stays.
$(RUNTIME): pyproject.toml uv.lock | $(UV)
	@tools/step '[2/3] Python packages' $(UV) sync --frozen --quiet --no-dev --inexact
	@touch $@

# The platform packages carry the programs. OpenCode's install script only links its own into
# place; npm runs such scripts or not, depending on its version, so it is run here. npm brings one
# for every kind of processor, of which the others are not needed.
NPM_CI = npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
$(PROGRAMS): package.json package-lock.json
	@tools/step '[3/3] OpenCode, 150 MB' $(NPM_CI) --omit=dev
	@node node_modules/opencode-ai/postinstall.mjs
	@find node_modules/opencode-*/bin -name opencode -links 1 -delete
	@touch $@

# The tests need more: other clients, and a browser. The package of Chromium holds it compressed,
# together with the libraries that a bare machine lacks; it unpacks those only where it believes to be
# in a cloud function, and everything into the directory for temporary files.
CHROMIUM := $(CURDIR)/node_modules/.chromium
$(TEST_PROGRAMS): package.json package-lock.json
	@tools/step 'OpenCode, a browser and other clients for the tests' $(NPM_CI)
	@node node_modules/opencode-ai/postinstall.mjs
	@mkdir -p $(CHROMIUM)
	TMPDIR=$(CHROMIUM) AWS_LAMBDA_JS_RUNTIME=nodejs20.x node --input-type=module --eval \
		'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	@touch $(PROGRAMS) $@

# A client of the tests that cannot be installed beside the present SDK.
$(SDK03): tests/support/sdk03/requirements.txt | $(UV)
	$(UV) venv --quiet --clear $(@D)
	$(UV) pip install --quiet --python $(@D) --requirement $<
	@touch $@

# Frameworks with a client. What they need themselves is as it was on the day that they were tried.
.tools/clients/%/.installed: tests/clients/requirements/%.txt | $(PACKAGES) $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)
	$(UV) pip install --quiet --python $(@D) --exclude-newer 2026-11-14 --requirement $<
	@touch $@

# By the machine's own pip if there is one: to make an environment first takes several seconds.
PIP_INSTALL := pip install --quiet --disable-pip-version-check
$(CURDIR)/.tools/bin/uv:
	@tools/step '[1/3] uv, which installs the rest' sh -c 'python3 -m $(PIP_INSTALL) --target .tools uv || \
		{ python3 -m venv .tools && .tools/bin/$(PIP_INSTALL) uv; }'

.PHONY: needed
needed:
	@tools/needed $(if $(OWN_OPENCODE),,--opencode)
