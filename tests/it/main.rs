//! Integration tests: the built binary and the pure machines, one module a subject.

#![allow(clippy::unwrap_used)] // a test fails by panicking

mod bad_input;
mod bad_models;
mod bits;
mod commands;
mod drives;
mod fault_points;
mod full_disk;
mod guarded;
mod guards;
mod history;
mod interrupted;
mod lab;
mod layouts;
mod locked;
mod locks;
mod metrics;
mod odd_disks;
mod parity;
mod plans;
mod rig;
mod seldom;
mod simulator;
mod stuck;
mod supervised;
mod tidy;
