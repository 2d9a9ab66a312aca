//! Starts actors anew when they die. Does no work of its own.
//!
//! Invariants:
//! - the state of a dead actor is dropped, and with it whatever it held exclusively, before the
//!   next incarnation starts;
//! - the directory names an actor only while it can take messages.

use std::time::Instant;

use kameo::actor::PreparedActor;
use kameo::error::{ActorStopReason, PanicError};
use kameo::mailbox;
use kameo::prelude::*;

use crate::directory::{Directory, Place};
use crate::messages::RunMessage;
use crate::policy::RestartWindow;
use crate::reply::Failure;

/// How an actor is kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restart {
    /// It owns a resource and no state that matters.
    Always,
    /// It is a machine: without its state the run is over, and the disk takes over.
    Never,
}

/// Runs an actor, again and again, until its place in the directory is cleared or it has died
/// too often.
pub(crate) async fn supervise<A, M>(
    directory: Directory,
    place: fn(&Directory) -> &Place<M>,
    mailbox_capacity: usize,
    args: A::Args,
    restart: Restart,
) where
    A: Actor + Message<M>,
    A::Args: Clone + Sync,
    M: Send + 'static,
{
    let mut window = RestartWindow::default();
    while let Some(reason) = incarnation::<A, M>(&directory, place, mailbox_capacity, &args).await {
        let actor = <A as Actor>::name();
        tracing::error!(actor, reason, "actor died");
        let wait = match restart {
            Restart::Always => window.died(Instant::now()),
            Restart::Never => None,
        };
        let Some(wait) = wait else {
            let failure = Failure::Dead { actor, reason };
            directory.end(Err(failure));
            return;
        };
        tokio::time::sleep(wait).await;
        directory.run().post(RunMessage::Restarted { actor, reason });
    }
}

/// One life of an actor; `None` when it ended because nobody needs it any more.
async fn incarnation<A, M>(
    directory: &Directory,
    place: fn(&Directory) -> &Place<M>,
    mailbox_capacity: usize,
    args: &A::Args,
) -> Option<String>
where
    A: Actor + Message<M>,
    A::Args: Clone,
    M: Send + 'static,
{
    let prepared = PreparedActor::<A>::new(mailbox::bounded(mailbox_capacity));
    let actor = prepared.actor_ref().clone();
    let mailbox = actor.mailbox_sender().clone();
    let depth = Box::new(move || {
        mailbox.max_capacity().zip(mailbox.capacity()).map_or(0, |(most, free)| most - free)
    });
    if !place(directory).set(actor.recipient(), depth) {
        return None;
    }
    let ended = prepared.spawn(args.clone()).await;
    place(directory).clear();
    match ended {
        Ok(Ok((_state, ActorStopReason::Normal))) => None,
        Ok(Ok((_state, ActorStopReason::Panicked(panic)))) => Some(describe(&panic)),
        Ok(Ok((_state, reason))) => Some(reason.to_string()),
        Ok(Err(panic)) => Some(describe(&panic)),
        Err(join) => Some(join.to_string()),
    }
}

fn describe(panic: &PanicError) -> String {
    panic.with_str(str::to_owned).unwrap_or_else(|| panic.to_string())
}
