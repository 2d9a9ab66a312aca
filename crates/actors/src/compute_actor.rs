//! [`ComputeActor`]: owns the device. The device has its own thread; the actor only enqueues.

use std::sync::{Arc, OnceLock};

use compute::{Device, DeviceError};
use kameo::prelude::*;

use crate::fault::{Delivery, FaultPlan};
use crate::messages::ComputeRequest;
use crate::policy::{Verdict, judge};
use crate::reply::Failure;
use crate::watch::Watch;

pub(crate) struct ComputeActor {
    device: Box<dyn Device>,
    /// Why this device is of no use any more, once that is known.
    useless: Arc<OnceLock<String>>,
    watch: Watch,
    faults: FaultPlan,
}

/// Opens the device; called for every incarnation, after the device before was dropped.
pub(crate) type OpenDevice = Arc<dyn Fn() -> Box<dyn Device> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct ComputeArgs {
    pub(crate) open: OpenDevice,
    pub(crate) watch: Watch,
    pub(crate) faults: FaultPlan,
}

impl Actor for ComputeActor {
    type Args = ComputeArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "compute"
    }

    async fn on_start(args: ComputeArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        let ComputeArgs { open, watch, faults } = args;
        Ok(ComputeActor { device: open(), useless: Arc::default(), watch, faults })
    }
}

impl Message<ComputeRequest> for ComputeActor {
    type Reply = ();

    async fn handle(&mut self, request: ComputeRequest, _: &mut Context<Self, ()>) {
        if self.faults.message("compute", request.kind()).await == Delivery::Lost {
            return;
        }
        self.die_if_useless();
        let reply = self.watch.over(("compute", request.kind()), request.reply);
        let useless = Arc::clone(&self.useless);
        let done = Box::new(move |result: Result<_, DeviceError>| {
            let result = result.map_err(Failure::from);
            if let Err(failure) = &result
                && judge(failure) == Verdict::RestartActor
            {
                useless.get_or_init(|| failure.to_string());
            }
            reply.send(result);
        });
        self.device.enqueue(request.command, done);
        self.die_if_useless();
    }
}

impl ComputeActor {
    /// Makes way for an incarnation that opens another device.
    fn die_if_useless(&self) {
        if let Some(why) = self.useless.get() {
            panic!("{why}");
        }
    }
}
