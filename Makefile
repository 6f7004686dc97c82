# Short names for what scripts/ and cargo do. `make help` lists them.

# Where this file is, which need not be where make was called. (make's own functions would split a path at its spaces.)
top := $(shell dirname "$(strip $(MAKEFILE_LIST))")

.DEFAULT_GOAL := help
.PHONY: help demo images test bench doc fmt deny

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' "$(top)"/Makefile

demo: ## several processes take turns under a lock: no server, no root, under 20 s
	@sh "$(top)"/scripts/demo.sh

images: ## the servers that the tests run against, as images or for chroot; pulled or made from Debian packages
	@sh "$(top)"/scripts/images.sh

test: ## everything that a change has to pass
	@sh "$(top)"/scripts/test.sh

bench: ## what a held lock costs in memory and in renewals
	@sh "$(top)"/scripts/cargo.sh bench -p fencelock --bench held

doc: ## the documentation, in target/doc
	@sh "$(top)"/scripts/cargo.sh doc --workspace --all-features --no-deps

fmt: ## format the code
	@sh "$(top)"/scripts/cargo.sh fmt --all

deny: ## licences and known weaknesses of the dependencies (needs cargo-deny)
	@sh "$(top)"/scripts/deny.sh
