//! [`Directory`]: where each actor is right now. The supervisor writes it, everybody else reads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kameo::actor::Recipient;
use kameo::error::SendError;
use tokio::sync::oneshot;

use crate::messages::{ComputeRequest, NodeMessage, OptimizerMessage, RunMessage, StoreRequest};
use crate::{Failure, Summary};

const MOVE_IN_POLL: Duration = Duration::from_millis(1);

/// The current address of one actor.
pub(crate) struct Place<M: Send + 'static> {
    tenant: RwLock<Tenant<M>>,
    /// Messages so far.
    posted: AtomicU64,
}

/// Counts the messages that wait in an actor's mailbox.
pub(crate) type Depth = Box<dyn Fn() -> usize + Send + Sync>;

enum Tenant<M: Send + 'static> {
    Nobody,
    Actor {
        recipient: Recipient<M>,
        depth: Depth,
    },
    /// The run is over: nobody moves in any more.
    Closed,
}

impl<M: Send + 'static> Default for Place<M> {
    fn default() -> Self {
        Place { tenant: RwLock::new(Tenant::Nobody), posted: AtomicU64::new(0) }
    }
}

impl<M: Send + 'static> Place<M> {
    /// False when the place is closed.
    pub(crate) fn set(&self, recipient: Recipient<M>, depth: Depth) -> bool {
        let mut tenant = self.tenant.write().unwrap_or_else(PoisonError::into_inner);
        let open = !matches!(*tenant, Tenant::Closed);
        if open {
            *tenant = Tenant::Actor { recipient, depth };
        }
        open
    }

    pub(crate) fn clear(&self) {
        let mut tenant = self.tenant.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*tenant, Tenant::Closed) {
            *tenant = Tenant::Nobody;
        }
    }

    /// Lets the actor go for good: it ends when its mailbox is empty.
    pub(crate) fn close(&self) {
        *self.tenant.write().unwrap_or_else(PoisonError::into_inner) = Tenant::Closed;
    }

    /// Messages that wait for the actor; none with nobody there.
    pub(crate) fn depth(&self) -> usize {
        match &*self.tenant.read().unwrap_or_else(PoisonError::into_inner) {
            Tenant::Actor { depth, .. } => depth(),
            Tenant::Nobody | Tenant::Closed => 0,
        }
    }

    fn mailbox(&self) -> Mailbox {
        Mailbox { posted: self.posted.load(Ordering::Relaxed), depth: self.depth() }
    }

    fn is_empty(&self) -> bool {
        matches!(*self.tenant.read().unwrap_or_else(PoisonError::into_inner), Tenant::Nobody)
    }

    /// Delivers without waiting. With nobody there the message is dropped, and a reply in it
    /// answers `Lost`.
    pub(crate) fn post(&self, message: M) {
        let recipient = match &*self.tenant.read().unwrap_or_else(PoisonError::into_inner) {
            Tenant::Actor { recipient, .. } => recipient.clone(),
            Tenant::Nobody | Tenant::Closed => return,
        };
        self.posted.fetch_add(1, Ordering::Relaxed);
        if let Err(SendError::MailboxFull(message)) = recipient.tell(message).try_send() {
            // Mailboxes hold more than the machines ever have in flight; should that be wrong,
            // a slow delivery beats a lost one.
            tracing::warn!("a mailbox is full");
            std::thread::spawn(move || recipient.tell(message).blocking_send());
        }
    }
}

/// What waits for an actor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mailbox {
    /// Messages so far.
    pub(crate) posted: u64,
    pub(crate) depth: usize,
}

/// All actors of this process.
#[derive(Clone, Default)]
pub(crate) struct Directory {
    places: Arc<Places>,
}

#[derive(Default)]
struct Places {
    run: Place<RunMessage>,
    node: Place<NodeMessage>,
    store: Place<StoreRequest>,
    compute: Place<ComputeRequest>,
    optimizer: Place<OptimizerMessage>,
    /// Set before the message is sent, which nobody may be there to hear yet.
    stop: AtomicBool,
    /// Where the end of the run is waited for.
    ended: Mutex<Option<oneshot::Sender<Ended>>>,
}

/// How a run ended: by its own machine, or because an actor could not be kept alive.
pub(crate) type Ended = Result<Summary, Failure>;

impl Directory {
    /// A directory with nobody in it, and the place where the run's end will be told.
    pub(crate) fn new() -> (Directory, oneshot::Receiver<Ended>) {
        let (sender, receiver) = oneshot::channel();
        let directory = Directory::default();
        *directory.ended_sender() = Some(sender);
        (directory, receiver)
    }

    /// Tells the end of the run; only the first call counts.
    pub(crate) fn end(&self, ended: Ended) {
        if let Some(sender) = self.ended_sender().take() {
            // Nobody listening means that nobody needs to know.
            let _ = sender.send(ended);
        }
    }

    /// Messages that wait in each mailbox, by actor.
    pub(crate) fn mailbox_depths(&self) -> Vec<(&'static str, usize)> {
        self.mailboxes().map(|(actor, mailbox)| (actor, mailbox.depth)).to_vec()
    }

    /// What waits in each mailbox, by actor.
    pub(crate) fn mailboxes(&self) -> [(&'static str, Mailbox); 5] {
        [
            ("run", self.run().mailbox()),
            ("node", self.node().mailbox()),
            ("store", self.store().mailbox()),
            ("compute", self.compute().mailbox()),
            ("optimizer", self.optimizer().mailbox()),
        ]
    }

    /// Waits until every actor has moved in or the run is over: what is posted to an empty place
    /// is lost.
    async fn everybody_in(&self) {
        while self.run().is_empty()
            || self.node().is_empty()
            || self.store().is_empty()
            || self.compute().is_empty()
            || self.optimizer().is_empty()
        {
            tokio::time::sleep(MOVE_IN_POLL).await;
        }
    }

    /// Asks the run to stop: now, or as soon as it has started.
    pub(crate) fn stop(&self) {
        self.places.stop.store(true, Ordering::SeqCst);
        self.run().post(RunMessage::StopRequested);
    }

    /// Starts the run once everybody is there, unless it was told to stop before.
    pub(crate) async fn start(&self) {
        self.everybody_in().await;
        if self.places.stop.load(Ordering::SeqCst) {
            self.run().post(RunMessage::StopRequested);
        }
        self.run().post(RunMessage::Start);
    }

    /// Lets every actor go.
    pub(crate) fn close(&self) {
        self.run().close();
        self.node().close();
        self.optimizer().close();
        self.compute().close();
        self.store().close();
    }

    fn ended_sender(&self) -> MutexGuard<'_, Option<oneshot::Sender<Ended>>> {
        self.places.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn run(&self) -> &Place<RunMessage> {
        &self.places.run
    }

    pub(crate) fn node(&self) -> &Place<NodeMessage> {
        &self.places.node
    }

    pub(crate) fn store(&self) -> &Place<StoreRequest> {
        &self.places.store
    }

    pub(crate) fn compute(&self) -> &Place<ComputeRequest> {
        &self.places.compute
    }

    pub(crate) fn optimizer(&self) -> &Place<OptimizerMessage> {
        &self.places.optimizer
    }
}
