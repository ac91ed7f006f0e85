//! How much is measured.

use crate::load::Shape;
use std::time::Duration;

/// One kind of fast call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    /// What it is called in the results.
    pub(crate) name: &'static str,
    /// The path at the server: `json` or `sse`, by how it answers.
    pub(crate) server: &'static str,
    /// What the clients do.
    pub(crate) shape: Shape,
    /// Whether latencies at a fixed rate are measured, too.
    pub(crate) fixed: bool,
}

/// The size of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// `full`, `quick` or `smoke`.
    pub(crate) name: &'static str,
    /// How often all targets take their turn.
    pub(crate) rounds: usize,
    /// How long a turn is.
    pub(crate) turn: Duration,
    /// The kinds of fast calls.
    pub(crate) cases: &'static [Case],
    /// Sessions for memory and start.
    pub(crate) sessions: usize,
    /// How often everything is killed and started.
    pub(crate) starts: usize,
    /// How often the worker is killed under load.
    pub(crate) kills: usize,
    /// How often the program is replaced under load.
    pub(crate) upgrades: usize,
    /// How far these are apart. Five starts within half a minute, and the keeper lets the next worker wait.
    pub(crate) apart: Duration,
    /// Clients that call meanwhile.
    pub(crate) clients: usize,
}

impl Plan {
    /// What takes 10 to 15 minutes.
    pub(crate) fn full() -> Plan {
        Plan {
            name: "full",
            rounds: 7,
            turn: Duration::from_millis(1500),
            cases: &CASES,
            sessions: 100_000,
            starts: 5,
            kills: 15,
            upgrades: 4,
            apart: Duration::from_millis(6200),
            clients: 8,
        }
    }

    /// What takes less than two minutes.
    pub(crate) fn quick() -> Plan {
        Plan {
            name: "quick",
            rounds: 3,
            turn: Duration::from_millis(400),
            sessions: 10_000,
            starts: 3,
            kills: 4,
            upgrades: 1,
            apart: Duration::from_millis(500),
            ..Plan::full()
        }
    }

    /// What shows that everything works, and no figure worth a look.
    pub(crate) fn smoke() -> Plan {
        Plan {
            name: "smoke",
            rounds: 1,
            turn: Duration::from_millis(60),
            cases: &SMOKE_CASES,
            sessions: 64,
            starts: 1,
            kills: 1,
            upgrades: 1,
            apart: Duration::from_millis(50),
            clients: 2,
        }
    }
}

const CASES: [Case; 6] = [
    // The rows of the design are about this one.
    case("JSON, 1 KiB, 16 clients", "json", 64, 16, KIB, true),
    case("JSON, 1 KiB, 1 client", "json", 1, 1, KIB, true),
    case("JSON, 16 KiB, 16 clients", "json", 64, 16, 16 * KIB, false),
    case("JSON, 1 MiB, 4 clients", "json", 4, 4, 1024 * KIB, false),
    case("SSE, 1 KiB, 16 clients", "sse", 64, 16, KIB, true),
    case("JSON, 1 KiB, 64 clients, 1,024 sessions", "json", 1024, 64, KIB, false),
];

const SMOKE_CASES: [Case; 3] = [
    case("JSON, 1 KiB, 2 clients", "json", 4, 2, KIB, true),
    case("JSON, 64 KiB, 2 clients", "json", 2, 2, 64 * KIB, false),
    case("SSE, 1 KiB, 2 clients", "sse", 2, 2, KIB, true),
];

const fn case(
    name: &'static str,
    server: &'static str,
    sessions: usize,
    clients: usize,
    text_bytes: usize,
    fixed: bool,
) -> Case {
    Case { name, server, shape: Shape { sessions, clients, text_bytes, wait_ms: 0 }, fixed }
}

const KIB: usize = 1024;
