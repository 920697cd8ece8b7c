//! Tests over a real nats-server and real processes. Begin with [`kit`].
#![forbid(unsafe_code)]
