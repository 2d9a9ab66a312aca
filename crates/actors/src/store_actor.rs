//! [`StoreActor`]: passes requests to the store, whose engine has threads of its own, and knows
//! when nothing is in flight.

use std::sync::Arc;

use kameo::prelude::*;
use store::{Done, Scratch, TrainingStore};

use crate::fault::{Delivery, FaultPlan};
use crate::gate::Gate;
use crate::messages::StoreRequest;
use crate::reply::Reply;
use crate::watch::Watch;

pub(crate) struct StoreActor {
    args: StoreArgs,
}

#[derive(Clone)]
pub(crate) struct StoreArgs {
    pub(crate) store: Arc<TrainingStore>,
    /// There when the run's limits park inputs or spill gradients.
    pub(crate) scratch: Option<Arc<Scratch>>,
    /// Outlives the actor: operations of a dead incarnation are still in flight.
    pub(crate) gate: Gate,
    pub(crate) watch: Watch,
    pub(crate) faults: FaultPlan,
}

impl Actor for StoreActor {
    type Args = StoreArgs;
    type Error = kameo::error::Infallible;

    fn name() -> &'static str {
        "store"
    }

    async fn on_start(args: StoreArgs, _: ActorRef<Self>) -> Result<Self, Self::Error> {
        Ok(StoreActor { args })
    }
}

impl Message<StoreRequest> for StoreActor {
    type Reply = ();

    async fn handle(&mut self, request: StoreRequest, _: &mut Context<Self, ()>) {
        if self.args.faults.message("store", request.kind()).await == Delivery::Lost {
            return;
        }
        let store = Arc::clone(&self.args.store);
        let lane = ("store", request.kind());
        let (gate, watch) = (&self.args.gate, &self.args.watch);
        match request {
            StoreRequest::ReadWeights { at, elements, precision, after, reply } => {
                let done = pass(gate, watch.over(lane, reply));
                store.read_weights(at, elements, precision, after, done);
            }
            StoreRequest::GatherRows { at, width, ids, precision, reply } => {
                let done = pass(gate, watch.over(lane, reply));
                store.gather_rows(at, width, &ids, precision, done);
            }
            StoreRequest::ReadChunk { layer, slot, chunk, reply } => {
                store.read_chunk(layer, slot, chunk, pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::WriteChunk { layer, slot, chunk, bytes, hashes, again, reply } => {
                let done = pass(gate, watch.over(lane, reply));
                store.write_chunk((layer, slot, chunk), (bytes, hashes), Some(again), done);
            }
            StoreRequest::FinishLayer { layer, slot, waits, reply } => {
                store.finish_layer(layer, slot, waits, pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::Save { slots, reply } => {
                store.save_slots(&slots, pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::Commit { kind, state, reply } => {
                let counters = Arc::clone(&store);
                let reply = Reply::new(move |result: Result<(), _>| {
                    reply.send(result.map(|()| counters.counters()));
                });
                store.commit(kind, *state, pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::WriteScratch { start, bytes, range, reply } => {
                self.scratch().write(start, (&bytes, range), pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::ReadScratch { start, len, reply } => {
                self.scratch().read(start, len, pass(gate, watch.over(lane, reply)));
            }
            StoreRequest::Drain { reply } => gate.when_empty(watch.over(lane, reply)),
        }
    }
}

impl StoreActor {
    fn scratch(&self) -> &Scratch {
        let Some(scratch) = &self.args.scratch else { panic!("this run has no scratch file") };
        scratch
    }
}

/// The store's way to answer `reply`, which counts as in flight until then.
fn pass<T: 'static>(gate: &Gate, reply: Reply<T>) -> Done<T> {
    let inside = gate.enter();
    Box::new(move |result| {
        reply.send(result.map_err(Into::into));
        drop(inside);
    })
}
