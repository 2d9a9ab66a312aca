//! [`ComputeActor`]: owns the device. The device has its own thread; the actor only enqueues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use compute::{Device, DeviceError};
use kameo::prelude::*;

use crate::fault::{Delivery, FaultPlan};
use crate::messages::ComputeRequest;

pub(crate) struct ComputeActor {
    device: Box<dyn Device>,
    faults: FaultPlan,
}

/// Opens the device; called for every incarnation, after the device before was dropped.
pub(crate) type OpenDevice = Arc<dyn Fn() -> Box<dyn Device> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct ComputeArgs {
    pub(crate) open: OpenDevice,
    pub(crate) faults: FaultPlan,
}

impl Actor for ComputeActor {
    type Args = ComputeArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "compute"
    }

    async fn on_start(args: ComputeArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        Ok(ComputeActor { device: (args.open)(), faults: args.faults })
    }
}

impl Message<ComputeRequest> for ComputeActor {
    type Reply = ();

    async fn handle(&mut self, request: ComputeRequest, _: &mut Context<Self, ()>) {
        if self.faults.message("compute", request.kind()).await == Delivery::Lost {
            return;
        }
        let reply = request.reply;
        let gone = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&gone);
        let done = Box::new(move |result: Result<_, DeviceError>| {
            told.store(matches!(result, Err(DeviceError::Gone)), Ordering::Relaxed);
            reply.send(result.map_err(Into::into));
        });
        self.device.enqueue(request.command, done);
        // A device that is gone says so at once and for ever: the next incarnation opens another.
        assert!(!gone.load(Ordering::Relaxed), "the device's thread is gone");
    }
}
