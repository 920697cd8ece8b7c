//! What the test binaries of this package share.
#![forbid(unsafe_code)]
