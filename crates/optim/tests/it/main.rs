//! The optimizer's arithmetic against PyTorch, against plain twins, and against its own promises.

mod finite;
mod golden;
mod lr;
mod norm;
mod update;
