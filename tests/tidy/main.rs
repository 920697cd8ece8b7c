//! House rules as tests.
#![forbid(unsafe_code)]
