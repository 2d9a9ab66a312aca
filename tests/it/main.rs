//! Integration tests: the built binary and the pure machines, one module a subject.

#![allow(clippy::unwrap_used)] // a test fails by panicking

mod simulator;
