# Short names for what scripts/ and cargo do. `make help` lists them.

# Where this file is, which need not be where make was called. (make's own functions would split a path at its spaces.)
top := $(shell dirname "$(strip $(MAKEFILE_LIST))")
cargo := sh "$(top)"/scripts/cargo.sh

.DEFAULT_GOAL := help
.PHONY: help demo images test test-all test-parts matrix soak bench bench-held bench-instructions package doc fmt deny

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' "$(top)"/Makefile

demo: ## several processes take turns under a lock: no server, no root
	@echo "Building. The first time takes up to a minute."
	@$(cargo) run --quiet -p fencelock --features sqlite --example demo

images: ## the servers that the tests run against: pulled or made from Debian packages
	@sh "$(top)"/scripts/servers.sh

test: ## what every change has to pass
	@sh "$(top)"/scripts/test.sh

test-all: ## everything else, each a named part that can be run alone (PARTS="redlock models"); the parts: make test-parts
	@sh "$(top)"/scripts/test.sh all $${PARTS:-}

test-parts: ## list the parts of make test-all
	@sh "$(top)"/scripts/test.sh parts

matrix: ## docs/conformance.md, from what the last runs of the suite showed
	@$(cargo) run --quiet -p conformance-tests --example matrix -- docs/conformance.md

soak: ## torture, with faults of the server too: on each backend and version (SECONDS=60 KINDS="sqlite etcd" for less), or at an address (URL=...)
	@$(cargo) run -p soak -- $${SECONDS:-600} $${KINDS:-} $${URL:+--url "$$URL"}

bench: ## what locks cost, beside other libraries and raw round trips, into docs/performance.md (BACKENDS="redis etcd" for less)
	@$(cargo) run --release -p lock-bench -- $${BACKENDS:-} --page docs/performance.md

bench-held: ## what a held lock costs in memory
	@$(cargo) bench -p fencelock --bench held

bench-instructions: ## what the client costs in instructions, the same in each run (needs valgrind)
	@$(cargo) run --release -p lock-bench -- memory --only instructions

# cargo unpacks a version once: what an earlier run packed would be built again.
package: ## every crate as it would be published, built from that alone
	@rm -rf "$${CARGO_HOME:-$${HOME:-/root}/.cargo}"/registry/src/-*/
	@$(cargo) package --workspace --exclude lock-bench --exclude models --exclude soak --exclude test-servers

doc: ## the documentation, in target/doc
	@$(cargo) doc --all-features --no-deps

fmt: ## format the code
	@$(cargo) fmt --all

deny: ## licences and known weaknesses of the dependencies (needs cargo-deny)
	@$(cargo) deny check
