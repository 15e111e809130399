# The two commands are `make run` and `make test`; both do all their set-up themselves.
SHELL := /bin/bash
# Debian's own first: it is optimized by profiles, and twice as fast as one that a version manager has compiled without.
PYTHON ?= $(shell for each in /usr/bin/python3.11 python3.11 python3; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$each && break; done)
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := cgroupfs resctrl state reconciler tests
# More for `make run`: ARGS="--seconds 300 --kubelet static-1.22 --containers fake"
ARGS ?=

.PHONY: run test setup lint style types unit search faults e2e scenes cluster vm vmcores monitoring bench protection virtual virtual-short protos docs lock artifact deb rpm artifact-test artifact-lock image image-test screenshots site site-test clean help

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: setup ## run the agent: against this machine's kubelet, else against the embedded node for 60 s
	@exec $(BIN)/python -m tests.node $(ARGS)

test: setup style unit ## lint, types and all tests

setup: $(VENV)/.ready ## the virtual environment and, through deploy/setup-debian.sh, Debian's packages

# The interpreter is asked to import what it needs first: a .venv that was copied or half made is made again. Modules are
# compiled when they are imported: the tests keep byte code elsewhere, and most of what is installed is never imported.
$(VENV)/.ready: requirements/dev.txt deploy/setup-debian.sh
	deploy/setup-debian.sh
	test -x $(BIN)/python && $(BIN)/python -c 'import sys, pip' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --require-hashes -r requirements/dev.txt
	touch $@

lint: style imports

style: setup
	$(BIN)/ruff format --check --quiet $(PACKAGES) deploy
	$(BIN)/ruff check --quiet $(PACKAGES) deploy

imports: setup
	$(BEHIND) $(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache

types: setup
	$(BEHIND) $(BIN)/mypy

# First what mostly waits, with the processors to itself when it needs them: daemons on nodes made of directories,
# containers, and what asks the kernel for facts. Behind it, three at a time and the longest first, what needs nothing
# but a processor (the type check, five parts of the tests). Then what needs idle CPUs and uses few (mark `quiet`), two
# at a time: of those with real containers one at a time has the machine's pods. What has the mark `alone` has the
# machine to itself afterwards: it measures or fills the CPUs. The few tests that failed beside others decide at the
# end, alone.
PARTS = types unit-daemon unit-daemon-starts unit-containers unit-facts unit-rest unit-deciding unit-reconciler unit-cli unit-actuators imports services
AGAIN = $(VENV)/again
unit: setup
	rm -rf $(AGAIN) && mkdir -p $(AGAIN)
	$(MAKE) --no-print-directory --jobs=7 --output-sync=target $(PARTS)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target quiet-nodes quiet-containers
	$(PYTEST) $(NAMES)/alone -m alone $(call marked,alone)
	$(BIN)/python -m tests.again $(AGAIN) -q $(ORDER)

# The tests' directories are in memory where a GiB of it is free: hundreds of stores and node trees are written and synced.
MEMORY = $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 1048576 2>/dev/null && echo /dev/shm)
# Byte code is kept, the tests' own too, also where the environment says otherwise: four parts and one after them would
# compile 1200 modules each.
PYTEST = env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/$(VENV)/bytecode $(BIN)/python -m pytest -q $(ORDER)
# Behind all that waits, daemons and containers in sessions and groups of their own as well.
BEHIND = $(BIN)/python -m tests.behind
# Shuffled, and the same each time: whoever changes nothing breaks nothing. `make search` shuffles anew.
ORDER = --randomly-seed=1
NAMES = -p tests.again --again=$(AGAIN)
PURE = PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(BEHIND) $(PYTEST) -p no:cacheprovider \
	-o tmp_path_retention_policy=failed -m "not kernel and not containerd and not cluster"
WAITING = $(PYTEST) -p no:cacheprovider -m "(kernel or containerd) and not alone and not quiet"
DECIDING = $(addprefix tests/reconciler/,policies detectors interference placement pods responses control headroom)
ACTING = tests/reconciler/actuators tests/reconciler/signals
ELSEWHERE = tests/reconciler/cli
# The files in which a test has one of the marks (tests/conftest.py holds them to it): reading all files takes 12 s.
marked = $(sort $(shell grep -rlE 'mark\.($(1))' tests --include='test_*.py'))
KERNEL = $(call marked,kernel|containerd)
DAEMON = $(wildcard tests/daemon/test_*.py)
CONTAINERS = $(filter tests/e2e/%,$(KERNEL))
FACTS = $(filter-out tests/e2e/% tests/daemon/%,$(KERNEL))
STARTS = $(filter tests/daemon/test_o% tests/daemon/test_r% tests/daemon/test_s% tests/daemon/test_t%,$(DAEMON))
.PHONY: $(PARTS) bytecode quiet-nodes quiet-containers
# One process compiles what all of them import, while the type check has the other processor.
$(filter-out types imports services,$(PARTS)): bytecode
bytecode:
	-$(PYTEST) -p no:cacheprovider --collect-only tests/reconciler/cli/test_hostile_text.py tests/daemon >/dev/null

# The server that tests/protection/test_short_form.py measures; without it that is skipped.
services:
	-RUNLEVEL=1 deploy/setup-debian.sh --also redis-server=redis-server

unit-deciding:
	$(PURE) $(NAMES)/$@ $(DECIDING)

unit-reconciler:
	$(PURE) $(NAMES)/$@ tests/reconciler $(addprefix --ignore=,$(DECIDING) $(ACTING) $(ELSEWHERE))

unit-actuators:
	$(PURE) $(NAMES)/$@ $(ACTING)

unit-rest:
	$(PURE) $(NAMES)/$@ $(filter-out tests/reconciler/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)

unit-cli:
	$(PURE) $(NAMES)/$@ $(ELSEWHERE)

unit-daemon:
	$(WAITING) $(NAMES)/$@ $(filter-out $(STARTS),$(DAEMON))

unit-daemon-starts:
	$(WAITING) $(NAMES)/$@ $(STARTS)

unit-facts:
	$(WAITING) $(NAMES)/$@ $(FACTS)

unit-containers:
	$(WAITING) $(NAMES)/$@ $(CONTAINERS)

quiet-nodes:
	$(PYTEST) -p no:cacheprovider $(NAMES)/$@ -m quiet $(filter-out tests/e2e/%,$(call marked,quiet))

quiet-containers:
	$(PYTEST) -p no:cacheprovider $(NAMES)/$@ -m quiet $(filter tests/e2e/%,$(call marked,quiet))

search: setup ## the pure tests on examples that nobody has seen yet
	BYPASSD_SEARCH=1 $(BIN)/python -m pytest -q -m "not kernel and not containerd"

# The pure tests that run in part without BYPASSD_FULL.
PARTIAL = $(shell grep -rl BYPASSD_FULL tests/reconciler --include='test_*.py')
faults: setup ## every failed call, every crash and many evictions, of which `make test` has a part (hours)
	BYPASSD_FULL=1 BYPASSD_SEARCH=1 $(BIN)/python -m pytest -q -m "not kernel and not containerd" $(PARTIAL)

e2e: setup ## only the tests with real containers and with a kubelet that writes again, with their figures
	BYPASSD_FULL=1 $(BIN)/python -m pytest -q -s tests/e2e tests/node/test_no_fight.py tests/node/test_memory.py

scenes: setup ## services disturbed by CPU, memory and disk hogs and by their own quota, twenty times each (an hour)
	BYPASSD_FULL=1 $(BIN)/python -m pytest -q -s tests/node/test_disturbance.py

cluster: setup ## on a real control plane with a real kubelet (KUBEBUILDER_ASSETS: its programs; skipped without)
	-test -z "$$KUBEBUILDER_ASSETS$$BYPASSD_IMAGE" || ls dist/bypassd-*-image-x86_64.tar >/dev/null 2>&1 || \
		$(BIN)/python deploy/artifact/image.py
	$(BIN)/python -m pytest -q -p no:cacheprovider -m cluster tests/cluster

vm: setup ## the core suite in whole machines: cgroup v2 with systemd names, and pure v1 (qemu; minutes)
	tests/vm/run.sh v2
	tests/vm/run.sh v1

vmcores: setup ## core scheduling in a machine that has it: hyper-threads and a kernel built for it (10 minutes, once)
	tests/vm/cores.sh v2

vm-resctrl: setup ## the resctrl tests on a real kernel: Intel, Intel with L2, AMD (qemu with registers; minutes)
	tests/vm/resctrl.sh intel
	tests/vm/resctrl.sh intel-l2
	tests/vm/resctrl.sh amd

vm-idle: setup ## the idle classes of Linux 5.10, 6.1 and 6.12, measured for docs/cpu.md (qemu; 25 minutes)
	mkdir -p dist
	for machine in "v1 11" "v2 11" "v1 12" "v2 12" "v2 13"; do tests/vm/idle.sh $$machine || exit; done >dist/idle-class.jsonl
	$(BIN)/python -m tests.protection.idle dist/idle-class.jsonl

monitoring: setup ## check dashboard and alert rules with promtool too (Debian's prometheus, which is not started)
	RUNLEVEL=1 deploy/setup-debian.sh --also promtool=prometheus
	$(BIN)/python -m pytest -q tests/test_monitoring.py

bench: setup ## what the daemon costs and how fast it is: idle, starts beside a bare C loop, churn (needs root)
	$(BIN)/python -m tests.bench idle 110
	$(BIN)/python -m tests.bench idle 500
	$(BIN)/python -m tests.bench starts 45
	$(BIN)/python -m tests.bench churn 1000
	$(BIN)/python -m tests.bench memory 15

protection: setup ## online latency and BE work of real servers under each law (root; 15 minutes; ARGS=--whole: a night)
	RUNLEVEL=1 deploy/setup-debian.sh --also redis-server=redis-server nginx=nginx-light pg_lsclusters=postgresql node=nodejs
	$(BIN)/python -m tests.protection $(ARGS)

# The artifact is made only where there is none: the checkout's own packages are laid over its tree.
TARBALL_FOR_VIRTUAL = test -n "$$BYPASSD_ARTIFACT" || test -e dist/$(TARBALL) || \
	! command -v qemu-system-x86_64 >/dev/null || ! command -v mmdebstrap >/dev/null || $(MAKE) --no-print-directory artifact
virtual: setup ## the same of redis in virtual time, whatever else the host does (root, qemu; 5 minutes; ARGS=--short: 3)
	-RUNLEVEL=1 deploy/setup-debian.sh --also qemu-system-x86_64=qemu-system-x86 mmdebstrap=mmdebstrap mke2fs=e2fsprogs
	$(TARBALL_FOR_VIRTUAL)
	$(BIN)/python -m tests.virtual $(ARGS)

# No program is installed. A tarball that cannot be made is a failure, where the programs are that need one.
virtual-short: setup ## four laws on Linux 5.10 with bounds that have a margin (3 minutes)
	$(TARBALL_FOR_VIRTUAL)
	$(BIN)/python -m tests.virtual --ci

screenshots: setup ## the pictures of the page in docs/images (Debian's chromium and pngquant)
	deploy/setup-debian.sh --also chromium=chromium pngquant=pngquant
	$(BIN)/python -m tests.page

protos: setup ## generate the CRI messages anew
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. reconciler/sources/criapi/cri.proto
	$(BIN)/python -m tests.e2e.criapi

docs: setup ## write the generated files: example configuration, its documentation, completion, rights, the drawing of the rooms
	$(BIN)/python -m reconciler.config.docs
	$(BIN)/python -m reconciler.cli.completion
	$(BIN)/python -m reconciler.cli.rights
	$(BIN)/python -m tests.architecture draw
	$(BIN)/python deploy/dashboard.py

# An environment of its own: `make test` does without mkdocs.
SITE_BIN := .venv-site/bin
.venv-site/.ready: requirements/site.txt
	test -x $(SITE_BIN)/python && $(SITE_BIN)/python -c 'import sys, pip' 2>/dev/null || { rm -rf .venv-site; $(PYTHON) -m venv .venv-site; }
	$(SITE_BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/site.txt
	touch $@

site: .venv-site/.ready ## the documents as a site: dist/site (mkdocs; seconds)
	$(SITE_BIN)/python deploy/site.py

site-test: site setup ## the built site in headless Chromium: colours, 400 pixels, search, no request to elsewhere
	deploy/setup-debian.sh --also chromium=chromium
	BYPASSD_SITE="$(CURDIR)/dist/site" $(BIN)/python -m pytest -q tests/page/test_site.py

VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
TARBALL = bypassd-$(VERSION)-linux-x86_64.tar.gz

artifact: setup ## the self-contained tarball for hosts without Python: dist/ (Debian 12 with apt; a minute)
	$(BIN)/python deploy/artifact/build.py

deb: artifact ## the same as a Debian package
	$(BIN)/python deploy/artifact/deb.py dist/$(TARBALL) --output dist

rpm: artifact ## the same as an RPM package
	deploy/setup-debian.sh --also rpmbuild=rpm
	$(BIN)/python deploy/artifact/rpm.py dist/$(TARBALL) --output dist

# The second time with another umask, time zone and directory.
artifact-test: deb rpm ## build all three twice and test them: the same bytes, contents, installation, upgrade, removal
	deploy/setup-debian.sh --also lintian=lintian mandoc=mandoc lexgrog=man-db shellcheck=shellcheck cpio=cpio
	umask 077; export TZ=Pacific/Auckland; \
		$(BIN)/python deploy/artifact/build.py --output dist/again --cache dist/cache && \
		$(BIN)/python deploy/artifact/deb.py dist/again/$(TARBALL) --output dist/again && \
		$(BIN)/python deploy/artifact/rpm.py dist/again/$(TARBALL) --output dist/again
	BYPASSD_ARTIFACT="$(CURDIR)/dist/$(TARBALL)" BYPASSD_ARTIFACT_AGAIN="$(CURDIR)/dist/again/$(TARBALL)" \
		$(BIN)/python -m pytest -q tests/artifact

image: setup ## the container image, an OCI layout of the tarball's tree: dist/ (no daemon needed; a minute)
	$(BIN)/python deploy/artifact/image.py

image-test: setup ## build the image twice and test it: the same bytes, and the DaemonSet's pod under containerd (root)
	$(BIN)/python deploy/artifact/image.py
	$(BIN)/python deploy/artifact/image.py --output dist/again --cache dist/cache
	BYPASSD_IMAGE="$$(echo $(CURDIR)/dist/bypassd-*-image-*.tar)" BYPASSD_IMAGE_AGAIN="$$(echo $(CURDIR)/dist/again/bypassd-*-image-*.tar)" \
		$(BIN)/python -m pytest -q tests/artifact/test_image.py

artifact-lock: setup ## pin the Debian packages of the tarball's interpreter anew (after apt-get update)
	$(BIN)/python deploy/artifact/build.py --lock

lock: ## pin every package with its hashes (needs uv)
	uv pip compile -q --generate-hashes --no-emit-index-url --python-version 3.11 requirements/runtime.in -o requirements/runtime.txt
	uv pip compile -q --generate-hashes --no-emit-index-url --python-version 3.11 requirements/dev.in -o requirements/dev.txt
	uv pip compile -q --generate-hashes --no-emit-index-url --python-version 3.11 requirements/site.in -o requirements/site.txt

clean: ## remove what set-up and tools made
	rm -rf $(VENV) .venv-site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage dist
