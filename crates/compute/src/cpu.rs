//! [`CpuDevice`]: commands run in order on one thread of its own, their loops on a shared pool.
//!
//! Invariants:
//! - all blocks that grow with the model come from the budget; outside it are 8 MiB of a product's
//!   packed operand, per thread a block of the other one, the tiles of attention (600 KiB for heads of
//!   128) and 8 bytes per position, and 12 bytes per token of head statistics;
//! - every command answers exactly once, a panic included.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::thread::JoinHandle;

use model::{Budget, ModelConfig};
use rayon::ThreadPool;

use crate::{Command, ComputeDtype, Device, DeviceError, Done, Outcome};

mod bound;
mod decoder;
mod gradients;
mod head;
mod state;
mod workspace;

use state::State;
pub use workspace::workspace;

/// Layers on the CPU.
pub struct CpuDevice {
    /// `None` only while the device is dropped.
    queue: Option<Sender<(Command, Done)>>,
    thread: Option<JoinHandle<()>>,
}

impl CpuDevice {
    /// A device for models of `config`, whose blocks are leased from `budget` and whose loops run
    /// on `threads`.
    ///
    /// # Panics
    /// If the operating system refuses a thread.
    pub fn new(
        config: &ModelConfig,
        dtype: ComputeDtype,
        budget: Budget,
        threads: Arc<ThreadPool>,
    ) -> CpuDevice {
        let (queue, commands) = channel();
        let mut state = State::new(config, dtype, budget);
        let thread = std::thread::Builder::new()
            .name("compute".into())
            .spawn(move || serve(&mut state, &commands, &threads))
            .expect("a thread for the device");
        CpuDevice { queue: Some(queue), thread: Some(thread) }
    }
}

impl Device for CpuDevice {
    fn enqueue(&mut self, command: Command, done: Done) {
        let Some(queue) = &self.queue else { return done(Err(DeviceError::Gone)) };
        if let Err(SendError((_, done))) = queue.send((command, done)) {
            done(Err(DeviceError::Gone));
        }
    }
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice").finish_non_exhaustive()
    }
}

impl Drop for CpuDevice {
    /// Waits for the commands already enqueued.
    fn drop(&mut self) {
        self.queue = None;
        let Some(thread) = self.thread.take() else { return };
        // A completion may own the device: its thread cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            // A panic of the thread has already been answered as `Gone`.
            let _ = thread.join();
        }
    }
}

fn serve(state: &mut State, commands: &Receiver<(Command, Done)>, threads: &ThreadPool) {
    while let Ok((command, done)) = commands.recv() {
        let run = AssertUnwindSafe(|| threads.install(|| state.execute(command)));
        let result: Result<Outcome, DeviceError> = catch_unwind(run)
            .unwrap_or_else(|payload| Err(DeviceError::Panicked(message(payload.as_ref()))));
        done(result);
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown".into())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn panic_payloads_become_text() {
        assert_eq!(message(&"plain"), "plain");
        assert_eq!(message(&String::from("formatted")), "formatted");
        assert_eq!(message(&7u8), "unknown");
    }

    #[test]
    fn a_device_whose_thread_is_gone_says_so() {
        let (queue, commands) = channel();
        drop(commands);
        let mut device = CpuDevice { queue: Some(queue), thread: None };
        assert!(matches!(device.run(Command::Clear), Err(DeviceError::Gone)));
    }
}
