//! The store from outside: life cycle, damage, crashes, faults, real disks.
// Everything here is a test, the functions they share included.
#![allow(clippy::unwrap_used)]

mod campaign;
mod crash;
mod damage;
mod disk;
mod faults;
mod healing;
mod history;
mod layouts;
mod lifecycle;
mod mutations;
mod neighbours;
mod spread;
mod support;
mod waiting;
