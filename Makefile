# Every target installs what it needs: Python packages into .venv, OpenCode and ripgrep into
# node_modules. Needed on the machine: Python 3.11 or later, make, and Node with npm or an OpenCode.

.DEFAULT_GOAL := help
.PHONY: help serve serve-cluster doctor demo-peers test test-programs test-fast test-lowest test-opencode2 kills chaos clients fuzz check image image-test deploy-test units-test release-files docs site screens screenshots record qualify bench bench-quick
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
# Tests start the program hundreds of times; without bytecode each start would compile all of it.
unexport PYTHONDONTWRITEBYTECODE

UV := $(or $(shell command -v uv 2>/dev/null),$(CURDIR)/.tools/bin/uv)
PACKAGES := .venv/.installed
RUNTIME := .venv/.installed-to-serve
PROGRAMS := node_modules/.installed
TEST_PROGRAMS := node_modules/.installed-for-tests
SDK03 := .tools/a2a-sdk-0.3/.installed
CLIENTS := $(patsubst tests/clients/requirements/%.txt,.tools/clients/%/.installed,\
	$(wildcard tests/clients/requirements/*.txt)) .tools/clients/javascript/.installed
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
	@echo 'make test-lowest  run these with the lowest versions of the packages that are declared'
	@echo 'make test-opencode2  run the live tests with the preview of OpenCode 2, some of which `test` includes'
	@echo 'make kills      kill the service at random moments; KILLS=200 SEED=1'
	@echo 'make chaos      kill parts of a cluster at random and check what clients see; SECONDS=600 SEED=1'
	@echo 'make clients    record what people see in other clients; ARGS="litellm" runs only that one'
	@echo 'make check      check format, lint, types, direction of imports, generated pages'
	@echo 'make image      build the container image; ARCH=arm64 TAG=name, ARGS=--prepare to build it elsewhere'
	@echo 'make image-test  build and run the image without a daemon or a registry; needs root, mmdebstrap, buildah'
	@echo 'make deploy-test  give the files in deploy/ to systemd-analyze, kubectl or kustomize, docker compose, promtool'
	@echo 'make units-test  run the systemd units in a systemd of their own; needs root and systemd'
	@echo 'make release-files  build what a release consists of; TAG=v2.0.0'
	@echo 'make docs       write the generated pages'
	@echo 'make site       build the site of the documentation into build/site'
	@echo 'make screens    update the terminal screens in tests/screens'
	@echo 'make screenshots  update the pictures of the console'
	@echo 'make bench      measure this and other servers, and write docs/performance.md (25 minutes)'
	@echo 'make bench-quick  measure for two minutes, and fail on a missed target'
	@echo 'make fuzz       send 100,000 mutated requests to the service; ARGS="--seed 1 --count 5000"'
	@echo 'make qualify    test VERSION=… of OpenCode, and record the result in docs/opencode.md'
	@echo 'make record     record event streams of the installed OpenCode into the test data'

# Only to serve, an OpenCode that is on the path already is as good as the one of package.json.
OWN_OPENCODE := $(shell command -v opencode 2>/dev/null)
TO_SERVE_WITH = PATH="$(if $(OWN_OPENCODE),$(dir $(OWN_OPENCODE)):)$(CURDIR)/node_modules/.bin:$(RIPGREP):$$PATH"
SERVES = --auto-demo $(and $(WORKSPACE),--opencode-workspace-root "$(WORKSPACE)")

TO_SERVE := $(if $(wildcard $(RUNTIME)),,needed) $(RUNTIME) $(if $(OWN_OPENCODE),,$(PROGRAMS))

serve: $(TO_SERVE)
	@$(TO_SERVE_WITH) exec $(WITHOUT_OURS) $(BIN)/opencode-a2a serve $(SERVES) $(and $(OPEN),--open) $(ARGS)

serve-cluster: $(PACKAGES) $(PROGRAMS)
	@$(WITH_PROGRAMS) exec $(WITHOUT_OURS) $(BIN)/python -m tools.cluster \
		$(and $(WORKSPACE),--workspace "$(WORKSPACE)") $(ARGS)

doctor: $(TO_SERVE)
	@$(TO_SERVE_WITH) exec $(WITHOUT_OURS) $(BIN)/opencode-a2a doctor $(SERVES) $(ARGS)

demo-peers: $(PACKAGES) $(PROGRAMS)
	PATH="$(BIN):$(CURDIR)/node_modules/.bin:$(RIPGREP):$$PATH" $(BIN)/python tools/demo_peers.py $(ARGS)

# Many tests wait for an OpenCode: two processes more than the two cores that they are planned for.
# The order is that of tests/conftest.py, which has the longest first. Three OpenCodes, browsers and
# databases can starve one another for longer than a test waits: what failed is tried alone, at most
# twice, and named and counted at the end.
IN_PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder
ALONE = echo 'Repeating the failed tests one at a time.' && \
	UV="$(UV)" $(WITH_PROGRAMS) $(BIN)/pytest -v --last-failed --maxfail 3 $(ARGS)

test: $(if $(wildcard $(PACKAGES)),,needed) $(PACKAGES) $(TEST_PROGRAMS) $(SDK03)
	UV="$(UV)" $(WITH_PROGRAMS) $(BIN)/pytest $(IN_PARALLEL) $(ARGS) || \
		{ [ $$? -eq 1 ] && { $(ALONE) || { [ $$? -eq 1 ] && $(ALONE); }; }; }

# What `test` installs; continuous integration does that while `check` runs.
test-programs: $(TEST_PROGRAMS) $(SDK03)

test-fast: $(PACKAGES)
	$(BIN)/pytest $(IN_PARALLEL) -m "not live and not browser" $(ARGS)

# The whole live suite on the preview of OpenCode 2, of which `test` runs a part.
OPENCODE2 := node_modules/@opencode-ai/cli-linux-x64-baseline/bin/opencode2
ON_OPENCODE2 := $(addprefix tests/live/test_,$(addsuffix .py,adoption answers background chat \
	commands differences durability environment extensions_contract extensions_inspect \
	extensions_interrupts extensions_sessions facts failures fleet grants interrupts kills operations \
	outages patches peers process replicas sessions steering storage traces turns))
test-opencode2: $(PACKAGES) $(TEST_PROGRAMS)
	$(WITH_PROGRAMS) OPENCODE_UNDER_TEST="$(CURDIR)/$(OPENCODE2)" $(BIN)/pytest -p no:xdist \
		$(shell sed -n "s/^\(tests[^ ]*\).*/--deselect '\1'/p" tests/live/differs-2.txt) \
		$(or $(ARGS),$(ON_OPENCODE2))

LOWEST := .tools/lowest/.installed
test-lowest: $(PACKAGES) $(LOWEST)
	$(dir $(LOWEST))bin/python tools/lowest.py
	$(dir $(LOWEST))bin/python -m pytest $(IN_PARALLEL) -m "not live and not browser" $(ARGS)

# A test of these takes as long as it is told to, or builds an image first.
UNLIMITED := -o faulthandler_timeout=0

kills: $(PACKAGES) $(PROGRAMS)
	$(WITH_PROGRAMS) OPENCODE_A2A_TEST_KILLS=$(KILLS) OPENCODE_A2A_TEST_SEED=$(SEED) \
		$(BIN)/pytest -p no:xdist $(UNLIMITED) -v -k "service_is_killed or never_doubled" \
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
	$(BIN)/deptry src
	$(BIN)/pytest -q tests/test_architecture.py tests/test_words.py
	$(BIN)/python tools/docs.py --check
	$(BIN)/python tools/dashboard.py --check

image: $(PACKAGES)
	$(BIN)/python -m tools.image --uv $(UV) $(and $(ARCH),--arch $(ARCH)) $(and $(TAG),--tag $(TAG)) $(ARGS)

# On a base of the distribution's packages, which is what the recipe would install on its own base.
IMAGE_BASE := .tools/image/base.tar
image-test: $(PACKAGES) $(IMAGE_BASE)
	UV="$(UV)" $(BIN)/pytest -p no:xdist $(UNLIMITED) -v -s tests/image/whole.py $(ARGS)

$(IMAGE_BASE):
	@mkdir -p $(@D)
	mmdebstrap --mode=root --variant=minbase --include=ca-certificates,git,ripgrep,tini,python3 trixie $@

deploy-test: $(PACKAGES)
	$(BIN)/pytest -p no:xdist $(UNLIMITED) -v tests/deploy/whole.py $(ARGS)

units-test: $(PACKAGES) $(PROGRAMS)
	UV="$(UV)" $(WITH_PROGRAMS) $(BIN)/pytest -p no:xdist $(UNLIMITED) -v tests/deploy/units.py $(ARGS)

# Tag, version and changelog have to agree. What it writes to dist/ is what a release consists of.
release-files: $(PACKAGES)
	$(BIN)/python -m tools.release $(or $(TAG),$(error Say which tag: make release-files TAG=v2.0.0)) --uv $(UV)

docs: $(PACKAGES)
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/dashboard.py

site: $(PACKAGES)
	$(BIN)/python -m tools.site

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
$(PROGRAMS): package.json package-lock.json .npmrc
	@tools/step '[3/3] OpenCode, 150 MB' $(NPM_CI) --omit=dev
	@node node_modules/opencode-ai/postinstall.mjs
	@find node_modules/opencode-*/bin -name opencode -links 1 -delete
	@touch $@

# The tests need more: other clients, OpenCode 2 where there is one, and a browser. The package of Chromium holds it compressed,
# together with the libraries that a bare machine lacks; it unpacks those only where it believes to be
# in a cloud function, and everything into the directory for temporary files.
CHROMIUM := $(CURDIR)/node_modules/.chromium
$(TEST_PROGRAMS): package.json package-lock.json .npmrc
	@tools/step 'OpenCode, a browser and other clients for the tests' $(NPM_CI)
	@node node_modules/opencode-ai/postinstall.mjs
	@mkdir -p $(CHROMIUM)
	TMPDIR=$(CHROMIUM) AWS_LAMBDA_JS_RUNTIME=nodejs20.x node --input-type=module --eval \
		'import chromium from "@sparticuz/chromium"; await chromium.executablePath()'
	@touch $(PROGRAMS) $@

# The lowest versions that pyproject.toml allows, and the tools of the tests as they are locked. A tool
# that declares more than that gets the lowest all the same: what is tested is the program.
$(LOWEST): pyproject.toml uv.lock tools/lowest.py | $(PACKAGES) $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)
	$(UV) pip install --quiet --python $(@D) --resolution lowest-direct --editable '.[all]'
	$(UV) pip freeze --python $(@D) --exclude-editable > $(@D)/lowest.txt
	$(UV) export --quiet --frozen --only-group dev --no-hashes --no-annotate --no-header \
		--no-emit-project --output-file $(@D)/locked.txt
	$(BIN)/python tools/lowest.py $(@D)/lowest.txt $(@D)/locked.txt > $(@D)/tools.txt
	$(UV) pip install --quiet --python $(@D) --override $(@D)/lowest.txt --requirement $(@D)/tools.txt
	@touch $@

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

.tools/clients/javascript/.installed: tests/clients/javascript/package.json tests/clients/javascript/package-lock.json
	@mkdir -p $(@D)
	cp $^ $(@D)
	cd $(@D) && $(NPM_CI)
	@touch $@

# By the machine's own pip if there is one: to make an environment first takes several seconds.
PIP_INSTALL := pip install --quiet --disable-pip-version-check
$(CURDIR)/.tools/bin/uv:
	@tools/step '[1/3] uv, which installs the rest' sh -c 'python3 -m $(PIP_INSTALL) --target .tools uv || \
		{ python3 -m venv .tools && .tools/bin/$(PIP_INSTALL) uv; }'

.PHONY: needed
needed:
	@tools/needed $(if $(OWN_OPENCODE),,--opencode)
