//! The numbers for Prometheus: what MCP's semantic conventions ask of a server, and what the session ledger adds.
//!
//! Events are counted as they happen, by [`Metrics`]; states are read when somebody scrapes, and come as a
//! [`Scrape`]. Label sets are bounded: servers come from the configuration, methods, outcomes and states from closed
//! lists. No label ever holds an id, a principal or a tool's name.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mainstay_core::code::Code;
use mainstay_core::id::ServerName;
use mainstay_core::limit::Limit;
use mainstay_core::wire::method::Method;
use mainstay_store::journal::Counters;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::distribution::Distribution;

mod journal;

/// What has happened since the worker started. Clones count into the same numbers, and are cheap.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    servers: BTreeMap<ServerName, PerServer>,
    operations: Family<[Label; 3], Distribution, Bounds>,
    lives: Family<[Label; 2], Distribution, Bounds>,
    ended: Family<[Label; 3], Counter>,
    restores: Family<[Label; 1], Counter>,
    stream_resumes: Family<[Label; 1], Counter>,
    /// By limit, each shown from the start.
    refused: [Counter; Limit::ALL.len()],
}

/// A label with a name and a value that are both from bounded lists.
type Label = (&'static str, Box<str>);

struct PerServer {
    label: Box<str>,
    /// By method and outcome, found once and then without a lock. What never happened is not shown.
    operations: Vec<[OnceLock<Distribution>; OUTCOMES]>,
    remade: Counter,
    resumed: Counter,
}

/// The bounds of a family's histograms, in seconds.
#[derive(Clone)]
struct Bounds(&'static [f64]);

impl MetricConstructor<Distribution> for Bounds {
    fn new_metric(&self) -> Distribution {
        Distribution::new(self.0)
    }
}

/// The state of the gateway at the time of a scrape.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// Sessions by `state`, ended ones as long as their tombstones are kept. None if they can't be counted now.
    pub sessions: Vec<(&'static str, u64)>,
    /// Sessions in memory.
    pub sessions_in_memory: u64,
    /// Owed deletes by `state`: those that are still tried, and those left to expire. None if they can't be read now.
    pub owed: Vec<(&'static str, u64)>,
    /// Commits of the ledger by `class` since the worker started.
    pub commits: Vec<(&'static str, u64)>,
    /// How long those commits took, all together, in microseconds.
    pub commit_us: u64,
    /// Rows that were found unreadable since the worker started.
    pub rows_refused: u64,
    /// Hints dropped because the queue was full.
    pub hints_dropped: u64,
    /// Hints that could not be written.
    pub hint_failures: u64,
    /// Jobs that wait for the ledger's writer.
    pub queue_depth: u64,
    /// The children of each stdio server.
    pub children: Vec<ChildrenScrape>,
    /// The servers whose era is known, each with that.
    pub eras: Vec<(String, &'static str)>,
    /// Connections that read a session's stream.
    pub streams_open: u64,
    /// Calls in flight.
    pub calls_in_flight: u64,
    /// Streams of calls in memory to which clients may come back.
    pub streams_held: u64,
    /// What the journal did.
    pub journal: Counters,
}

/// The children of one server at the time of a scrape.
#[derive(Clone, Debug, Default)]
pub struct ChildrenScrape {
    /// The server.
    pub server: String,
    /// Starts since the worker started, by their `outcome`.
    pub spawns: Vec<(&'static str, u64)>,
    /// Ends since the worker started, by `how`.
    pub exits: Vec<(&'static str, u64)>,
    /// The states that a server can be in, 1 for the one that it is in.
    pub states: Vec<(&'static str, u64)>,
}

impl Metrics {
    /// Counts for these servers. What is counted for another one is dropped.
    pub fn new<'a>(servers: impl IntoIterator<Item = &'a ServerName>) -> Self {
        let mut registry = Registry::default();
        let operations = Family::new_with_constructor(Bounds(OPERATION_SECONDS));
        let lives = Family::new_with_constructor(Bounds(SESSION_SECONDS));
        let (ended, restores) = (Family::default(), Family::default());
        let (remade, resumed) = (Family::<[Label; 1], Counter>::default(), Family::<[Label; 1], Counter>::default());
        let text = "How long requests took, from their arrival to their answer";
        registry.register_with_unit("mcp_server_operation_duration", text, Unit::Seconds, operations.clone());
        let text = "How long ended sessions had lived";
        registry.register_with_unit("mcp_server_session_duration", text, Unit::Seconds, lives.clone());
        registry.register(
            "mainstay_sessions_ended",
            "Sessions ended, by the state that they ended in and by why",
            ended.clone(),
        );
        registry.register("mainstay_restores", "Sessions asked for that were not in memory", restores.clone());
        let stream_resumes = Family::default();
        let text = "Streams that clients came back to, by what was there";
        registry.register("mainstay_stream_resumes", text, stream_resumes.clone());
        let text = "Sessions of servers that were made again, because the server had lost them";
        registry.register("mainstay_upstream_remade", text, remade.clone());
        let text = "Sessions of servers that went on after a restart of the gateway";
        registry.register("mainstay_upstream_resumed", text, resumed.clone());
        let refused = Family::<[Label; 1], Counter>::default();
        registry.register("mainstay_refused", "Requests refused at a limit, by its setting", refused.clone());
        let refused = Limit::ALL.map(|limit| refused.get_or_create_owned(&[("limit", limit.name().into())]));
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("mainstay_build", "The program that runs", build);
        let per_server = |name: &ServerName| PerServer {
            label: name.as_str().into(),
            operations: (0..METHODS.len()).map(|_| std::array::from_fn(|_| OnceLock::new())).collect(),
            remade: remade.get_or_create_owned(&[("server", name.as_str().into())]),
            resumed: resumed.get_or_create_owned(&[("server", name.as_str().into())]),
        };
        let servers = servers.into_iter().map(|name| (name.clone(), per_server(name))).collect();
        Self(Arc::new(Inner { registry, servers, operations, lives, ended, restores, stream_resumes, refused }))
    }

    /// Counts a request to `server` that was answered after `took`; `outcome` is why it failed, if it did.
    ///
    /// Takes no lock and allocates nothing, but for the first of its method and outcome.
    pub fn call(&self, server: &ServerName, method: Method, took: Duration, outcome: Option<Code>) {
        let Some(per_server) = self.0.servers.get(server) else { return };
        let (method, outcome) = (method_index(method), outcome_index(outcome));
        let cell = &per_server.operations[method][outcome];
        let distribution = cell.get_or_init(|| {
            self.0.operations.get_or_create_owned(&[
                ("mcp_method_name", METHODS[method].1.into()),
                ("server", per_server.label.clone()),
                ("outcome", outcome_name(outcome).into()),
            ])
        });
        distribution.observe(took);
    }

    /// Counts a session with `server` that ended in `state` for `reason` after it had `lived`.
    pub fn ended(&self, server: &ServerName, (state, reason): (&'static str, &'static str), lived: Duration) {
        let Some(per_server) = self.0.servers.get(server) else { return };
        let server = ("server", per_server.label.clone());
        self.0.ended.get_or_create_owned(&[server.clone(), ("state", state.into()), ("reason", reason.into())]).inc();
        self.0.lives.get_or_create_owned(&[server, ("outcome", state.into())]).observe(lived);
    }

    /// Counts a session that was asked for and not in memory: `resumed`, `refused` or `deferred`.
    pub fn restored(&self, result: &'static str) {
        self.0.restores.get_or_create_owned(&[("result", result.into())]).inc();
    }

    /// Counts a stream that a client came back to: found in `memory`, taken over from the `journal`, `finished` and taken
    /// before, `unknown`, or not to be told now (`deferred`).
    pub fn stream_resumed(&self, result: &'static str) {
        self.0.stream_resumes.get_or_create_owned(&[("result", result.into())]).inc();
    }

    /// Counts a request that was refused because `limit` is reached.
    pub fn refused(&self, limit: Limit) {
        self.0.refused[limit as usize].inc();
    }

    /// Counts a session of `server` that was made again.
    pub fn remade(&self, server: &ServerName) {
        if let Some(per_server) = self.0.servers.get(server) {
            per_server.remade.inc();
        }
    }

    /// Counts a session of `server` that went on after a restart of the gateway.
    pub fn resumed(&self, server: &ServerName) {
        if let Some(per_server) = self.0.servers.get(server) {
            per_server.resumed.inc();
        }
    }

    /// Everything as [`CONTENT_TYPE`] text.
    ///
    /// # Errors
    /// Never in practice: writing to a string does not fail.
    pub fn render(&self, scrape: &Scrape) -> Result<String, fmt::Error> {
        let mut text = String::new();
        encode_registry(&mut text, &self.0.registry)?;
        encode_registry(&mut text, &scrape.registry())?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("servers", &self.0.servers.len()).finish_non_exhaustive()
    }
}

impl Scrape {
    fn registry(&self) -> Registry {
        let mut registry = Registry::default();
        let gauges = |label: &'static str, values: &[(&'static str, u64)]| {
            let family = Family::<[Label; 1], Gauge>::default();
            for (name, value) in values {
                family.get_or_create_owned(&[(label, (*name).into())]).set(signed(*value));
            }
            family
        };
        let text = "Sessions by state, ended ones as long as they are kept";
        registry.register("mainstay_sessions", text, gauges("state", &self.sessions));
        let text = "Deletes of sessions of servers that are still owed";
        registry.register("mainstay_owed_deletes", text, gauges("state", &self.owed));
        let commits = Family::<[Label; 1], Counter>::default();
        for (class, count) in &self.commits {
            commits.get_or_create_owned(&[("class", (*class).into())]).inc_by(*count);
        }
        registry.register("mainstay_ledger_commits", "Transactions of the ledger, by their strongest write", commits);
        let seconds = Counter::<f64, AtomicU64>::default();
        seconds.inc_by(Duration::from_micros(self.commit_us).as_secs_f64());
        let text = "How long transactions of the ledger took; divided by their number, what one costs";
        registry.register_with_unit("mainstay_ledger_commit", text, Unit::Seconds, seconds);
        self.register_children(&mut registry);
        journal::register(&self.journal, &mut registry);
        let eras = Family::<[Label; 2], Gauge>::default();
        for (server, era) in &self.eras {
            eras.get_or_create_owned(&[("server", server.as_str().into()), ("era", (*era).into())]).set(1);
        }
        registry.register("mainstay_server_era", "The newest era of the protocol that a server speaks: 1 for it", eras);
        for (name, text, value) in [
            ("mainstay_rows_refused", "Rows of the ledger that were found unreadable", self.rows_refused),
            ("mainstay_hints_dropped", "Hints that found the ledger's queue full", self.hints_dropped),
            ("mainstay_hint_failures", "Hints that could not be written", self.hint_failures),
        ] {
            let counter = Counter::<u64>::default();
            counter.inc_by(value);
            registry.register(name, text, counter);
        }
        for (name, text, value) in [
            ("mainstay_sessions_in_memory", "Sessions in memory", self.sessions_in_memory),
            ("mainstay_ledger_queue_depth", "Jobs that wait for the ledger's writer", self.queue_depth),
            ("mainstay_streams_open", "Connections that read a session's stream", self.streams_open),
            ("mainstay_streams_held", "Streams in memory that clients may come back to", self.streams_held),
            ("mainstay_calls_in_flight", "Calls in flight", self.calls_in_flight),
        ] {
            let gauge = Gauge::<i64>::default();
            gauge.set(signed(value));
            registry.register(name, text, gauge);
        }
        registry
    }

    fn register_children(&self, registry: &mut Registry) {
        let (spawns, exits) = (Family::<[Label; 2], Counter>::default(), Family::<[Label; 2], Counter>::default());
        let states = Family::<[Label; 2], Gauge>::default();
        for children in &self.children {
            let labels = |name: &'static str, value: &'static str| {
                [("server", children.server.as_str().into()), (name, value.into())]
            };
            for (outcome, count) in &children.spawns {
                spawns.get_or_create_owned(&labels("outcome", outcome)).inc_by(*count);
            }
            for (how, count) in &children.exits {
                exits.get_or_create_owned(&labels("how", how)).inc_by(*count);
            }
            for (state, is_in) in &children.states {
                states.get_or_create_owned(&labels("state", state)).set(signed(*is_in));
            }
        }
        registry.register("mainstay_child_spawns", "Starts of servers' processes, by what became of them", spawns);
        registry.register("mainstay_child_exits", "Ends of servers' processes, by how they came", exits);
        registry.register("mainstay_server_state", "Where the processes of a server stand: 1 for what holds", states);
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn method_index(method: Method) -> usize {
    METHODS.iter().position(|(known, _)| *known == method).unwrap_or(METHODS.len() - 1)
}

/// Success comes first, then the codes in their order.
fn outcome_index(outcome: Option<Code>) -> usize {
    outcome.and_then(|code| Code::ALL.iter().position(|known| *known == code)).map_or(0, |position| position + 1)
}

fn outcome_name(index: usize) -> &'static str {
    index.checked_sub(1).and_then(|position| Code::ALL.get(position)).map_or("ok", |code| code.name())
}

/// What [`Metrics::render`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const OUTCOMES: usize = Code::ALL.len() + 1;

/// The methods with their names; everything else is `other`, the last.
const METHODS: &[(Method, &str)] = &[
    (Method::ToolsCall, "tools/call"),
    (Method::Initialize, "initialize"),
    (Method::Initialized, "notifications/initialized"),
    (Method::Ping, "ping"),
    (Method::Cancelled, "notifications/cancelled"),
    (Method::Progress, "notifications/progress"),
    (Method::SetLevel, "logging/setLevel"),
    (Method::Subscribe, "resources/subscribe"),
    (Method::Unsubscribe, "resources/unsubscribe"),
    (Method::ToolsList, "tools/list"),
    (Method::PromptsList, "prompts/list"),
    (Method::PromptsGet, "prompts/get"),
    (Method::ResourcesList, "resources/list"),
    (Method::ResourceTemplatesList, "resources/templates/list"),
    (Method::ResourcesRead, "resources/read"),
    (Method::Complete, "completion/complete"),
    (Method::Discover, "server/discover"),
    (Method::Other, "other"),
];

/// The conventions' bounds, and three finer ones: most calls through a gateway take less than 10 ms.
const OPERATION_SECONDS: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// The conventions end at five minutes; sessions here live for days.
const SESSION_SECONDS: &[f64] = &[1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 14_400.0, 86_400.0, 604_800.0];

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ServerName {
        ServerName::parse(text).unwrap()
    }

    #[test]
    fn o3_events_and_states_are_one_exposition() {
        let metrics = Metrics::new([&name("files")]);
        metrics.call(&name("files"), Method::ToolsCall, Duration::from_millis(3), None);
        metrics.call(&name("files"), Method::ToolsCall, Duration::from_secs(9), Some(Code::OutcomeUnknown));
        metrics.ended(&name("files"), ("expired", "idle"), Duration::from_secs(100));
        metrics.restored("resumed");
        metrics.stream_resumed("journal");
        metrics.refused(Limit::Openings);
        metrics.remade(&name("files"));
        let scrape =
            Scrape { sessions: vec![("ready", 5)], sessions_in_memory: 2, queue_depth: 1, ..Scrape::default() };
        let text = metrics.clone().render(&scrape).unwrap();
        for line in [
            "mcp_server_operation_duration_seconds_bucket{le=\"0.005\",mcp_method_name=\"tools/call\",server=\"files\",outcome=\"ok\"} 1",
            "mcp_server_operation_duration_seconds_count{mcp_method_name=\"tools/call\",server=\"files\",outcome=\"outcome_unknown\"} 1",
            "mcp_server_session_duration_seconds_count{server=\"files\",outcome=\"expired\"} 1",
            "mainstay_sessions_ended_total{server=\"files\",state=\"expired\",reason=\"idle\"} 1",
            "mainstay_restores_total{result=\"resumed\"} 1",
            "mainstay_stream_resumes_total{result=\"journal\"} 1",
            "mainstay_refused_total{limit=\"limits.initialize_per_minute\"} 1",
            "mainstay_refused_total{limit=\"session.streams_max\"} 0",
            "mainstay_upstream_remade_total{server=\"files\"} 1",
            "mainstay_upstream_resumed_total{server=\"files\"} 0",
            "mainstay_sessions{state=\"ready\"} 5",
            "mainstay_sessions_in_memory 2",
            "mainstay_ledger_queue_depth 1",
            "mainstay_build_info{version=\"0.1.0\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn o3_labels_are_bounded_by_the_configuration_and_closed_lists() {
        let metrics = Metrics::new([&name("files")]);
        metrics.call(&name("stranger"), Method::Ping, Duration::ZERO, None);
        metrics.ended(&name("stranger"), ("closed", "order"), Duration::ZERO);
        metrics.remade(&name("stranger"));
        assert!(!metrics.render(&Scrape::default()).unwrap().contains("stranger"));
        for (method, text) in METHODS {
            assert_eq!(METHODS[method_index(*method)].1, *text);
            assert!(*method == Method::Other || Method::of(text) == *method, "{text}");
        }
        for code in Code::ALL {
            assert_eq!(outcome_name(outcome_index(Some(code))), code.name());
        }
        assert_eq!(outcome_name(outcome_index(None)), "ok");
    }
}
