//! What a fast call costs in counts, which a busy machine does not change: allocations, and what the kernel counts of reads
//! and writes. The ledger's statements are counted in `sessions.rs` of the black-box tests.
//!
//! This program is the gateway, too: the very library, with an allocator that counts. Started as one it serves, and its
//! worker tells its counts to whoever connects to a socket of its own; started as a test it puts one in front of the
//! benchmark's server.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Gateway, RawClient, Setup};
use serde_json::json;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use tempfile::TempDir;

#[global_allocator]
static COUNTED: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    let first = std::env::args().nth(1);
    match first.as_deref() {
        Some("worker") => {
            if let Some(dir) = std::env::var_os(COUNTS_DIR) {
                tell_counts(Path::new(&dir)).expect("the test's directory is there");
            }
            mainstay::cli::main()
        }
        Some("serve") => mainstay::cli::main(),
        _ => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
            runtime.block_on(a_fast_call_allocates_no_more_than_it_did()).expect("counts within their bounds");
            ExitCode::SUCCESS
        }
    }
}

/// Answers every connection to a socket in `dir` with the counts as they are then.
fn tell_counts(dir: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket(dir, std::process::id()))?;
    std::thread::spawn(move || {
        for mut asking in listener.incoming().flatten() {
            let stats = COUNTED.stats();
            let counts = format!("{} {}", stats.allocations + stats.reallocations, stats.bytes_allocated);
            let _gone_already = asking.write_all(counts.as_bytes());
        }
    });
    Ok(())
}

fn socket(dir: &Path, pid: u32) -> PathBuf {
    dir.join(format!("{pid}.sock"))
}

/// What a worker has done so far.
#[derive(Debug, Clone, Copy)]
struct Counts {
    allocations: u64,
    allocated_bytes: u64,
    /// Reads and writes by `read`, `write` and their like with vectors: wake-ups of other threads, and answers in parts.
    transfers: u64,
}

impl Counts {
    fn of(dir: &Path, worker: u32) -> Result<Counts> {
        let mut told = String::new();
        UnixStream::connect(socket(dir, worker))?.read_to_string(&mut told)?;
        let (allocations, allocated_bytes) = told.split_once(' ').context("two counts")?;
        let io = std::fs::read_to_string(format!("/proc/{worker}/io"))?;
        let count = |name: &str| io.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        Ok(Counts {
            allocations: allocations.parse()?,
            allocated_bytes: allocated_bytes.parse()?,
            transfers: count("syscr:").zip(count("syscw:")).map(|(reads, writes)| reads + writes).context("both")?,
        })
    }
}

/// The benchmark's server, ended with its handle.
struct Upstream {
    child: Child,
    address: String,
}

impl Upstream {
    fn start() -> Result<Upstream> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mainstay-bench"));
        let mut child = command.arg("upstream").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = String::new();
        BufReader::new(child.stdout.take().context("its output")?).read_line(&mut said)?;
        Ok(Upstream { child, address: said.trim().to_owned() })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

async fn a_fast_call_allocates_no_more_than_it_did() -> Result<()> {
    let (upstream, dir) = (Upstream::start()?, TempDir::with_prefix("counts-")?);
    let config = format!(
        "[session]\nanswer_json_within = \"5s\"\n[servers.json]\nurl = \"http://{address}/json\"\n\
         [servers.sse]\nurl = \"http://{address}/sse\"\n",
        address = upstream.address
    );
    let program = std::env::current_exe()?;
    let shown = dir.path().to_str().context("a path that can be written")?;
    let gateway = Setup::new(&config).binary(&program).env(COUNTS_DIR, shown).start().await?;
    for (server, text_bytes, allocations_max, copies_max) in BOUNDS {
        let (allocations, copies) = a_call(&gateway, dir.path(), server, text_bytes).await?;
        ensure!(
            allocations <= allocations_max && copies <= copies_max,
            "{server}, {text_bytes} bytes: {allocations:.1} allocations (at most {allocations_max}), of {copies:.1} times \
             the text (at most {copies_max})"
        );
    }
    Ok(())
}

/// Allocations of one call, and their size as so many times the text that goes there and back.
async fn a_call(gateway: &Gateway, dir: &Path, server: &str, text_bytes: usize) -> Result<(f64, f64)> {
    let client = RawClient::open(&gateway.url(server)?, VERSION).await?;
    let arguments = json!({"bytes": text_bytes, "ms": 0, "text": "x".repeat(text_bytes)});
    for _ in 0..WARM_CALLS {
        client.call("echo", arguments.clone()).await?.result()?;
    }
    let worker = gateway.worker().await?.pid;
    let before = Counts::of(dir, worker)?;
    for _ in 0..CALLS {
        client.call("echo", arguments.clone()).await?.result()?;
    }
    let after = Counts::of(dir, worker)?;
    let a_call = |after: u64, before: u64| (after - before) as f64 / CALLS as f64;
    let allocations = a_call(after.allocations, before.allocations);
    let copies = a_call(after.allocated_bytes, before.allocated_bytes) / text_bytes as f64;
    let transfers = a_call(after.transfers, before.transfers);
    writeln!(
        std::io::stdout(),
        "{server}, {text_bytes} bytes: {allocations:.1} allocations, {copies:.2} times the text, {transfers:.1} transfers"
    )?;
    ensure!(transfers <= TRANSFERS_MAX, "{server}: {transfers:.1} transfers and wake-ups (at most {TRANSFERS_MAX})");
    Ok((allocations, copies))
}

/// A variable of the counting worker's: where it tells its counts.
const COUNTS_DIR: &str = "BENCH_COUNTS_DIR";
const VERSION: &str = "2025-11-25";
const WARM_CALLS: u64 = 50;
/// Enough that what the gateway does beside calls is a small part, however slow the machine is.
const CALLS: u64 = 400;
/// Server, text, allocations and copies that a call may take: what it takes now, and two fifths more.
const BOUNDS: [(&str, usize, f64, f64); 3] =
    [("json", 1024, 46.0, 38.0), ("json", 65_536, 46.0, 7.5), ("sse", 1024, 53.0, 32.0)];
/// Two now, the request and the answer; how often a thread has to be woken besides depends on what else runs.
const TRANSFERS_MAX: f64 = 6.0;
