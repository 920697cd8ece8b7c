# Each recipe is one line; `.ci/run` is the gate.
default: test

test:
    cargo test

lint:
    cargo fmt --all --check && cargo clippy --workspace --all-targets --all-features -- -D warnings

purity:
    .ci/purity

# Rewrites what is generated and what is expected.
gen:
    UPDATE=1 UPDATE_EXPECT=1 cargo test

demo:
    cargo run --release -- demo

# Prints the table of docs/performance.md; asserts nothing.
bench *ARGS:
    cargo run --release -p acri-benches -- {{ARGS}}

sim SEED N="1000":
    ACRI_SIM_SEED={{SEED}} ACRI_SIM_RUNS={{N}} cargo test -p acri-tests --test sim -- --nocapture

audit:
    cargo deny check bans licenses sources

ci:
    .ci/run
