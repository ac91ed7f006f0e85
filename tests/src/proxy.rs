//! A TCP proxy that treats connections as the network between a client and a gateway may.

use anyhow::Result;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A proxy in front of one address. Its connections end with the handle.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    target: SocketAddr,
    /// A connection on which nothing moves in either direction for so long is cut.
    silence_max: Duration,
    cuts: AtomicU64,
    /// Connections of a lower generation are dead: nothing passes, and no end is said.
    alive_from: watch::Sender<u64>,
}

impl Proxy {
    /// A proxy that cuts connections which are silent for `silence_max`.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn start(target: SocketAddr, silence_max: Duration) -> Result<Proxy> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let alive_from = watch::Sender::new(0);
        let shared = Arc::new(Shared { target, silence_max, cuts: AtomicU64::new(0), alive_from });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Ok(Proxy { address, shared, task })
    }

    /// The URL of a server's endpoint, through the proxy.
    #[must_use]
    pub fn url(&self, server: &str) -> String {
        format!("http://{}/mcp/{server}", self.address)
    }

    /// How many connections were cut for silence.
    #[must_use]
    pub fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::SeqCst)
    }

    /// Lets every connection of now die without a word, as when a machine sleeps or a firewall forgets: neither side hears
    /// anything any more, not even an end. Later connections work.
    pub fn drop_silently(&self) {
        self.shared.alive_from.send_modify(|generation| *generation += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and with them every connection.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let shared = Arc::clone(&shared);
        connections.spawn(async move { carry(client, &shared).await });
    }
}

async fn carry(client: TcpStream, shared: &Shared) {
    let generation = *shared.alive_from.borrow();
    let mut alive = shared.alive_from.subscribe();
    let Ok(server) = TcpStream::connect(shared.target).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let moved = Notify::new();
    let both = async {
        tokio::join!(copy(from_client, to_server, &moved), copy(from_server, to_client, &moved));
    };
    let dead = async {
        let _gone = alive.wait_for(|from| *from > generation).await.map(drop);
    };
    tokio::pin!(both, dead);
    let mut deadline = Instant::now() + shared.silence_max;
    loop {
        tokio::select! {
            () = &mut both => return,
            () = moved.notified() => deadline = Instant::now() + shared.silence_max,
            () = tokio::time::sleep_until(deadline) => {
                shared.cuts.fetch_add(1, Ordering::SeqCst);
                return;
            }
            () = &mut dead => std::future::pending().await,
        }
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, moved: &Notify) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        moved.notify_one();
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

const BUFFER_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::Proxy;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    async fn pair(silence_max: Duration) -> anyhow::Result<(Proxy, TcpStream, TcpStream)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Proxy::start(listener.local_addr()?, silence_max).await?;
        let client = TcpStream::connect(proxy.address).await?;
        let (server, _) = listener.accept().await?;
        Ok((proxy, client, server))
    }

    #[tokio::test]
    async fn a_silent_connection_is_cut_and_counted() -> anyhow::Result<()> {
        let (proxy, mut client, mut server) = pair(Duration::from_millis(300)).await?;
        server.write_all(b"x").await?;
        assert_eq!(client.read_u8().await?, b'x');
        assert_eq!(client.read(&mut [0]).await.unwrap_or(0), 0, "cut");
        assert_eq!(proxy.cuts(), 1);
        Ok(())
    }

    #[tokio::test]
    async fn a_dead_connection_says_nothing_and_a_later_one_works() -> anyhow::Result<()> {
        let (proxy, mut client, server) = pair(Duration::from_secs(60)).await?;
        proxy.drop_silently();
        drop(server);
        let silent = tokio::time::timeout(Duration::from_millis(200), client.read(&mut [0])).await;
        assert!(silent.is_err(), "not even an end");
        assert_eq!(proxy.cuts(), 0);
        Ok(())
    }
}
