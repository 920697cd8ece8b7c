//! The suite, against both adapters, and what only NATS can show.

mod nats_only;
