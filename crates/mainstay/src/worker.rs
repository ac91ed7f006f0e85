//! The worker process: attach to the keeper, open the ledger, serve, drain, exit. Starting is recovery; there is no
//! other way to start (S9).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use mainstay_core::code::TerminalStatus;
use mainstay_core::id::{Epoch, SessionKey};
use mainstay_core::session::{Contract, Terms};
use mainstay_keeper::client::{Attached, Custody, Held, Order, Welcome};
use mainstay_store::journal::Journal;
use mainstay_store::keys::Keyring;
use mainstay_store::{Place, Store, StoreError};
use mainstay_upstream::{Environment, Notice, Upstreams, dismiss, parse_label};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::admin;
use crate::auth::{Auth, Tokens};
use crate::config::{self, Config, StoreKind};
use crate::engine::census::Census;
use crate::engine::handover::HandoverView;
use crate::engine::handover::changes::{Changes, ServerChange, ServerFate, SettingChangeView};
use crate::engine::leavers::Leavers;
use crate::engine::modern::Offer;
use crate::engine::modern::attendance::Attendance;
use crate::engine::tally::Tally;
use crate::engine::view::{Facts, KnobView};
use crate::engine::{self, Engine, ListenStream, Served, Settings, listen};
use crate::reconcile;
use crate::runtime::{Clock, entropy, fill_with_entropy, spawn};
use crate::serve::{Front, guard::Guard, rate::Rate};
use crate::telemetry::metrics::Metrics;

/// Runs the worker until the keeper tells it to drain, or is gone. `file` is where its settings came from, if from a file.
///
/// # Errors
/// What kept it from serving; the keeper starts another.
pub fn run(file: Option<PathBuf>) -> anyhow::Result<()> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    let ended = runtime.block_on(serve(file));
    runtime.shutdown_timeout(SHUTDOWN_MAX);
    ended
}

async fn serve(file: Option<PathBuf>) -> anyhow::Result<()> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("taking the keeper's socket")?;
    let Attached { custody, welcome, mut orders } = Custody::attach(socket).await.context("attaching to the keeper")?;
    let Welcome { listeners, settings, keeper, worker_number, children, connections, handover, keeper_version } =
        welcome;
    let config = Config::from_snapshot(&settings).context("reading the configuration that the keeper holds")?;
    let mut listeners: BTreeMap<_, _> = listeners.into_iter().collect();
    let mcp = listener(&mut listeners, "mcp")?;
    let admin_listener = listener(&mut listeners, "admin")?;
    let facts = Facts {
        keeper_pid: keeper.pid(),
        worker_number,
        knobs: knobs(&config),
        mcp: mcp.local_addr()?.to_string(),
        admin: admin_listener.local_addr()?.to_string(),
        keeper_version,
        handover: handover.map(HandoverView::of),
        compare: {
            let in_force = config.clone();
            Some(Box::new(move |next: &[u8]| compared(&in_force, next)))
        },
        ..Facts::default()
    };
    let (engine, notices) = tokio::select! {
        built = build(&config, custody.clone(), facts, children) => built?,
        // Told to go before it could serve: there is nothing to drain.
        _ = orders.recv() => return Ok(()),
    };

    let mut vital = reconcile::start(&engine);
    vital.push(spawn(listen::attend(Arc::clone(&engine), notices)));
    let beating = Arc::clone(&engine);
    vital.push(spawn(async move { beating.beat.run().await }));
    let token = std::fs::read_to_string(config.admin_token_file()).context("reading the admin token")?;
    let stopping = Arc::clone(&engine);
    let administered = spawn(admin::serve(admin_listener, Arc::clone(&engine), token.trim().into(), async move {
        stopping.given_way().await;
    }));
    let front = Arc::new(front(&config, &engine)?);
    spawn(Arc::clone(&front).accept(mcp, connections));
    custody.ready().await;
    if let Some(file) = file.filter(|_| config.watch) {
        vital.push(spawn(reconcile::watch::run(Arc::clone(&engine), file)));
    }
    tracing::info!(worker = worker_number, epoch = engine.status().await.worker.epoch, "worker is ready");

    let order = tokio::select! {
        order = orders.recv() => order,
        () = panicked(vital) => anyhow::bail!("a part that the worker cannot do without has failed; another worker takes over"),
    };
    match order {
        Some(Order::Drain { .. }) => {
            tracing::info!("draining");
            engine.drain_worker().await;
            tokio::time::sleep(LAST_BYTES).await;
        }
        Some(Order::HandOver) => hand_over(&engine, &front, &mut orders).await,
        Some(Order::Detached) | None => tracing::warn!("the keeper is gone; this worker ends"),
    }
    // Who gave the order is waiting for its answer.
    let _answered = tokio::time::timeout(LAST_ANSWERS_MAX, administered).await;
    Ok(())
}

/// Gives way to the next worker, and stays for the calls that only this one can answer.
async fn hand_over(engine: &Arc<Engine>, front: &Front, orders: &mut mpsc::Receiver<Order>) {
    tracing::info!("handing over to the next worker");
    engine.begin_handover(OPENINGS_PATIENCE).await;
    if !front.settle(SETTLE_MAX).await {
        tracing::warn!("requests that nobody else can answer are left behind by the handover");
    }
    // Children are the next worker's, and nobody can come back for what their clients share one for.
    if !engine.until(SHARED_CALLS_PATIENCE, || engine.shared_calls() == 0).await {
        tracing::info!(calls = engine.shared_calls(), "calls on shared children are cut by the handover");
    }
    // The next worker is to find it, so it comes before the last word.
    let stays = front.exchanges.count() > 0 || engine.outlasts();
    let _presence = stays.then(|| engine.leavers.declare(engine.epoch)).flatten();
    let mut recorded = engine.leave_ledger().await;
    engine.custody.handed_over().await;
    tracing::info!(calls = engine.http_calls(), "handed over");
    let over = || front.open.count() == 0 && !engine.outlasts();
    let order = tokio::select! {
        _ = engine.until(STAY_MAX, over) => None,
        order = orders.recv() => order,
        () = engine.stay(&mut recorded) => None,
    };
    if let Some(Order::Drain { .. }) = order {
        engine.until(engine.settings().drain_grace, over).await;
    }
    engine.close();
    front.finish(LAST_BYTES).await;
    engine.end_recorded(&mut recorded);
    engine.flush().await;
}

/// Opens the ledger and builds the engine on it: keys, epoch, overdue sessions, in S9's order.
async fn build(
    config: &Config,
    custody: Custody,
    facts: Facts,
    children: Vec<Held>,
) -> anyhow::Result<(Arc<Engine>, Notices)> {
    let clock = Clock::system();
    let (place, streams, keyring, key_folder, leavers) = match config.store {
        StoreKind::Sqlite => {
            let folder = config.state_dir.join("keys");
            let keyring = Keyring::load_or_create(&folder, &mut fill_with_entropy).context("loading the keys")?;
            let file = |name: &str| Place::Sqlite(config.state_dir.join(name));
            let leavers = Leavers::look(config.state_dir.join("leaving"));
            (file("ledger.db"), file("streams.db"), keyring, Some(folder), leavers)
        }
        StoreKind::Memory => {
            let keyring = Keyring::ephemeral(&mut fill_with_entropy);
            (Place::Memory, Place::Memory, keyring, None, Leavers::none())
        }
    };
    let keyring = Arc::new(keyring);
    let store = Store::open(place, Arc::clone(&keyring)).context("opening the ledger")?;
    let journal = Journal::open(streams, Arc::clone(&keyring)).context("opening the journal")?;
    let nonce = u64::from_be_bytes(entropy()?);
    let epoch = begin(&store, clock, nonce, &custody).await?;
    if let Err(error) = journal.attach(epoch.counter).await {
        tracing::warn!(error = %error, "the journal can't be told of this worker: less of its children's custody is let go");
    }
    let census = Census::new(
        config.limits.sessions_max,
        config.session.max_per_principal,
        store.count_by_principal().await.context("counting the sessions")?,
    );
    let limits = &config.limits;
    let attendance = Attendance::new(limits.stateless_requests_per_principal, limits.listens_per_principal);
    let upstreams = Upstreams::new(mainstay_upstream::Parts {
        custody: Some(custody.clone()),
        environment: Arc::new(ProcessEnvironment),
        now: Arc::new(move || clock.now()),
        entropy: Arc::new(|| entropy().unwrap_or_default()),
        epoch: epoch.counter,
    });
    let (engine, notices) = Engine::new(engine::Parts {
        store,
        journal,
        keyring,
        custody,
        upstreams: Arc::new(upstreams),
        servers: served(config)?,
        census,
        attendance,
        leavers,
        metrics: Metrics::new(config.servers.keys()),
        key_folder,
        state_dir: config.state_dir.clone(),
        settings: settings(config),
        clock,
        epoch,
        facts,
    });
    engine.recall_servers().await;
    engine.hold(by_session(children, &engine.custody));
    engine.recall_eras().await;
    engine.adopt_shared();
    Arc::clone(&engine).adopt_calls().await;
    reconcile::expire::recover(&engine).await;
    Ok((engine, notices))
}

/// Begins this worker's epoch, for as long as that takes. While the disk is full or read-only requests wait in the
/// listeners' backlogs; to die of it would only make them wait longer.
async fn begin(store: &Store, clock: Clock, nonce: u64, custody: &Custody) -> anyhow::Result<Epoch> {
    let mut pause = EPOCH_RETRY_FIRST;
    loop {
        match store.begin_epoch(clock.now(), nonce).await {
            Ok(epoch) => return Ok(epoch),
            Err(error @ StoreError::OtherKeys) => {
                return Err(error).context("beginning this worker's epoch; the next worker loads the new keys");
            }
            Err(error) => {
                tracing::error!(error = %error, "the ledger cannot be written; requests wait until it can");
                // Not stuck, but waiting: the keeper must not replace this worker by another that waits as well.
                custody.waiting().await;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(EPOCH_RETRY_MAX);
    }
}

/// What the links have to say.
type Notices = mpsc::Receiver<(SessionKey, Notice)>;

/// Resolves when one of `tasks` has panicked. Those that end in order are none of its business.
async fn panicked(mut tasks: Vec<JoinHandle<()>>) {
    while !tasks.is_empty() {
        let (ended, _, rest) = futures_util::future::select_all(tasks).await;
        if ended.is_err() {
            return;
        }
        tasks = rest;
    }
    std::future::pending().await
}

/// The children in custody by their session. One that has a successor, or whose label says nothing to this version, is
/// ended.
fn by_session(children: Vec<Held>, custody: &Custody) -> BTreeMap<SessionKey, Held> {
    let mut held: BTreeMap<SessionKey, Held> = BTreeMap::new();
    let mut unwanted = Vec::new();
    for child in children {
        let Some(label) = parse_label(&child.label) else {
            tracing::warn!(
                pid = child.identity.pid(),
                "a child in custody has a label of another version and is ended"
            );
            unwanted.push(child);
            continue;
        };
        let older = match held.remove(&label.session) {
            Some(other) if other.spawned_at_unix_ms > child.spawned_at_unix_ms => {
                held.insert(label.session, other);
                Some(child)
            }
            other => {
                held.insert(label.session, child);
                other
            }
        };
        unwanted.extend(older);
    }
    for child in unwanted {
        let custody = custody.clone();
        spawn(async move { dismiss(&custody, child).await });
    }
    held
}

fn served(config: &Config) -> anyhow::Result<Vec<Served>> {
    let servers = config.upstream_servers()?;
    Ok(servers
        .into_iter()
        .map(|server| {
            let configured = config.servers.get(&server.name);
            let listen_stream = match configured.map(|configured| configured.listen_stream) {
                Some(config::ListenStream::Always) => ListenStream::Always,
                Some(config::ListenStream::Never) => ListenStream::Never,
                Some(config::ListenStream::Auto) | None => ListenStream::Auto,
            };
            let offer = match configured.map(|configured| configured.offer) {
                Some(config::Offer::Legacy) => Offer::Legacy,
                Some(config::Offer::Both) => Offer::Both,
                Some(config::Offer::Auto) | None => Offer::Auto,
            };
            let suspend_after = configured.map_or(config.session.suspend_after, |server| {
                server.suspend_after.unwrap_or(config.session.suspend_after)
            });
            let stateful = configured.is_some_and(config::Server::is_stateful);
            let (stateless, warned_at) = (Tally::default(), AtomicU64::new(0));
            Served { server, listen_stream, suspend_after, stateful, offer, stateless, warned_at }
        })
        .collect())
}

/// Every setting in force by its dotted name.
fn knobs(config: &Config) -> Vec<KnobView> {
    let settings = config::flattened(&config.to_json());
    settings.into_iter().map(|(name, value)| KnobView { name, value }).collect()
}

/// What changes from `in_force` to the configuration in bytes that a rehearsal has answered with; `None` if this version
/// does not understand them.
fn compared(in_force: &Config, next: &[u8]) -> Option<Changes> {
    let config::Changes { added, removed, changed, settings } = in_force.changes(&Config::from_snapshot(next).ok()?);
    let whole = |server, change| ServerChange { server, change, fields: Vec::new() };
    let added = added.into_iter().map(|server| whole(server, ServerFate::Added));
    let removed = removed.into_iter().map(|server| whole(server, ServerFate::Removed));
    let changed = changed.into_iter().map(|change| ServerChange {
        fields: change.fields,
        ..whole(change.server, if change.redefined { ServerFate::Redefined } else { ServerFate::Adjusted })
    });
    let settings = settings.into_iter().map(|config::SettingChange { name, before, after }| SettingChangeView {
        name,
        before,
        after,
    });
    Some(Changes { servers: added.chain(removed).chain(changed).collect(), settings: settings.collect() })
}

fn settings(config: &Config) -> Settings {
    let session = &config.session;
    Settings {
        terms: Terms {
            idle_expiry: session.idle_expiry.unwrap_or(NEVER),
            confirm_within: CONFIRM_WITHIN,
            touch_interval: TOUCH_INTERVAL,
            tombstone_retention: session.tombstone_retention.unwrap_or(NEVER),
        },
        answer_json_within: session.answer_json_within,
        drain_grace: session.drain_grace,
        calls_in_flight_max: session.calls_in_flight_max,
        streams_max: session.streams_max,
        contract: contract(config),
    }
}

/// The fingerprint of the way that clients authenticate (S15): mode and who vouches, never a credential.
fn contract(config: &Config) -> Contract {
    let mode = match config.auth.mode {
        config::AuthMode::None => "none",
        config::AuthMode::Token => "token",
    };
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, mode.as_bytes());
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    Contract::from_bytes(bytes)
}

fn front(config: &Config, engine: &Arc<Engine>) -> anyhow::Result<Front> {
    let auth = match config.auth.mode {
        config::AuthMode::None => Auth::Open,
        config::AuthMode::Token => Auth::Token(
            Tokens::new(&config.auth, Arc::new(ProcessEnvironment), Clock::system()).context("reading the tokens")?,
        ),
    };
    Ok(Front {
        engine: Arc::clone(engine),
        auth,
        guard: Guard {
            allowed_hosts: config.serve.allowed_hosts.clone(),
            allowed_origins: config.serve.allowed_origins.clone(),
            any_host: !config.listen.ip().is_loopback() && config.serve.allowed_hosts.is_empty(),
        },
        terminal: match config.session.terminal_status {
            config::TerminalStatus::Spec => TerminalStatus::Spec,
            config::TerminalStatus::Distinct => TerminalStatus::Distinct,
        },
        body_bytes_max: config.limits.body_bytes_max,
        header_bytes_max: config.limits.header_bytes_max,
        rate: Rate::new(config.limits.initialize_per_minute),
        require_agent: config.auth.require_agent,
        lobby: Arc::default(),
        exchanges: Tally::default(),
        undecided: Tally::default(),
        open: Tally::default(),
    })
}

fn listener(listeners: &mut BTreeMap<String, OwnedFd>, name: &str) -> anyhow::Result<TcpListener> {
    let socket = listeners.remove(name).ok_or_else(|| anyhow!("the keeper handed over no socket named `{name}`"))?;
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true).with_context(|| format!("preparing the socket `{name}`"))?;
    TcpListener::from_std(listener).with_context(|| format!("taking the socket `{name}`"))
}

/// The process's own environment and files, for `${VAR}` and `${file:PATH}`.
pub(crate) struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    #[expect(clippy::disallowed_methods, reason = "this is the worker's one home of its environment")]
    fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn file(&self, path: &Path) -> std::io::Result<String> {
        std::fs::read_to_string(path)
    }
}

/// A client that never says `initialized` is not coming back.
const CONFIRM_WITHIN: Duration = Duration::from_mins(1);
/// The ledger learns of a session's use at most this often (S5).
const TOUCH_INTERVAL: Duration = Duration::from_secs(5);
/// Longer than any ledger lives.
const NEVER: Duration = Duration::from_hours(24 * 365 * 100);
/// The pauses between two tries to begin the epoch.
const EPOCH_RETRY_FIRST: Duration = Duration::from_millis(50);
const EPOCH_RETRY_MAX: Duration = Duration::from_secs(1);
/// How long tasks may take to notice that the worker ends.
const SHUTDOWN_MAX: Duration = Duration::from_millis(500);
/// How long a handover waits for a moment at which no session is being opened.
const OPENINGS_PATIENCE: Duration = Duration::from_secs(5);
/// How long calls on children that are shared may go on once no new ones come.
const SHARED_CALLS_PATIENCE: Duration = Duration::from_secs(1);
/// How long clients wait at most, once a handover has begun, for what must be answered before it.
const SETTLE_MAX: Duration = Duration::from_secs(10);
/// How long this worker stays for calls on HTTP servers after it has handed over; the keeper allows a little more.
pub(crate) const STAY_MAX: Duration = Duration::from_mins(10);
/// How long the admin port may take for the answers that it has begun.
const LAST_ANSWERS_MAX: Duration = Duration::from_secs(2);
/// Time for the last bytes of ended streams to reach their sockets.
const LAST_BYTES: Duration = Duration::from_millis(50);
