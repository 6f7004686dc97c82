# Short names for what scripts/ and cargo do. `make help` lists them.

# Where this file is, which need not be where make was called. (make's own functions would split a path at its spaces.)
top := $(shell dirname "$(strip $(MAKEFILE_LIST))")

.DEFAULT_GOAL := help
.PHONY: help demo images test test-all test-parts matrix soak bench bench-held bench-instructions package doc fmt deny

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' "$(top)"/Makefile

demo: ## several processes take turns under a lock: no server, no root
	@sh "$(top)"/scripts/demo.sh

images: ## the servers that the tests run against: pulled or made from Debian packages
	@sh "$(top)"/scripts/servers.sh

test: ## what every change has to pass
	@sh "$(top)"/scripts/test.sh

test-all: ## everything else, each a named part that can be run alone (PARTS="redlock models"); the parts: make test-parts
	@sh "$(top)"/scripts/test.sh all $${PARTS:-}

test-parts: ## list the parts of make test-all
	@sh "$(top)"/scripts/test.sh parts

matrix: ## docs/conformance.md, from what the last runs of the suite showed
	@sh "$(top)"/scripts/matrix.sh

soak: ## torture, with faults of the server too: on each backend and version (SECONDS=60 KINDS="sqlite etcd" for less), or at an address (URL=...)
	@sh "$(top)"/scripts/cargo.sh run -p soak -- $${SECONDS:-600} $${KINDS:-} $${URL:+--url "$$URL"}

bench: ## what locks cost, beside other libraries and raw round trips, into docs/performance.md (BACKENDS="redis etcd" for less)
	@sh "$(top)"/scripts/bench.sh $${BACKENDS:-}

bench-held: ## what a held lock costs in memory and in renewals
	@sh "$(top)"/scripts/cargo.sh bench -p fencelock --bench held

bench-instructions: ## what the client costs in instructions, the same in each run (needs valgrind)
	@sh "$(top)"/scripts/cargo.sh run --release -p lock-bench -- memory --only instructions

package: ## every crate as it would be published, built from that alone
	@sh "$(top)"/scripts/package.sh

doc: ## the documentation, in target/doc
	@sh "$(top)"/scripts/cargo.sh doc --all-features --no-deps

fmt: ## format the code
	@sh "$(top)"/scripts/cargo.sh fmt --all

deny: ## licences and known weaknesses of the dependencies (needs cargo-deny)
	@sh "$(top)"/scripts/deny.sh
