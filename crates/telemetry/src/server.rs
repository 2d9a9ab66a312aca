//! The HTTP endpoint that Prometheus scrapes: `/metrics` and `/healthz`.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::metrics::Metrics;

/// How long [`Server::shutdown`] waits for scrapes in flight.
const DRAIN: Duration = Duration::from_secs(2);

/// Why metrics cannot be served.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The address is taken, foreign, or none at all.
    #[error(
        "cannot serve metrics on {addr}: {source}; choose another address with --metrics HOST:PORT \
         or turn them off with --metrics off"
    )]
    Bind {
        /// The address as given.
        addr: String,
        /// The system's answer.
        source: io::Error,
    },
}

/// A running endpoint; dropping it stops it.
#[derive(Debug)]
pub struct Server {
    local_addr: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<io::Result<()>>,
}

/// Serves `metrics` on `addr` (`host:port`; port 0 picks a free one) from a task of the current
/// tokio runtime.
///
/// # Errors
/// [`ServeError::Bind`], which names the address and the remedy.
pub async fn serve(addr: &str, metrics: Metrics) -> Result<Server, ServeError> {
    let bind = |source| ServeError::Bind { addr: addr.to_owned(), source };
    let listener = TcpListener::bind(addr).await.map_err(bind)?;
    let local_addr = listener.local_addr().map_err(bind)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = axum::serve(listener, routes(metrics)).with_graceful_shutdown(async {
        // A dropped sender stops the endpoint as well.
        let _ = stopped.await;
    });
    let task = tokio::spawn(serving.into_future());
    tracing::info!(%local_addr, "serve metrics");
    Ok(Server { local_addr, stop: Some(stop), task })
}

impl Server {
    /// The address it listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Closes the port, lets scrapes in flight end, and cuts off those that do not.
    pub async fn shutdown(mut self) {
        self.stop.take();
        if tokio::time::timeout(DRAIN, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

fn routes(metrics: Metrics) -> Router {
    Router::new()
        .route("/metrics", get(move || std::future::ready(scrape(&metrics))))
        .route("/healthz", get(|| std::future::ready("ok\n")))
}

fn scrape(metrics: &Metrics) -> impl IntoResponse + use<> {
    let content_type = format!("{}; charset=utf-8", prometheus::TEXT_FORMAT);
    ([(header::CONTENT_TYPE, content_type)], metrics.render())
}
