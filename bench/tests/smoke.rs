//! The benchmark works: it starts everything, measures every row, writes its files and leaves no process behind. Its figures
//! are of a debug build and mean nothing.

use serde_json::Value;
use std::process::Command;
use tempfile::TempDir;

#[test]
fn every_row_is_measured_and_every_count_is_sane() {
    let dir = TempDir::with_prefix("bench-smoke-").expect("a directory");
    let readme = dir.path().join("README.md");
    std::fs::write(&readme, "<!-- benchmark -->\nnone\n<!-- /benchmark -->\n").expect("a document");
    let output = Command::new(env!("CARGO_BIN_EXE_mainstay-bench"))
        .args(["--smoke", "--out"])
        .arg(dir.path())
        .arg("--readme")
        .arg(&readme)
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    let results: Value = serde_json::from_str(&read("results.json")).expect("JSON");
    let rows = results["rows"].as_array().expect("rows");
    let ids: Vec<&str> = rows.iter().filter_map(|row| row["id"].as_str()).collect();
    assert_eq!(ids, ROWS, "{results:#}");
    for row in rows.iter().filter(|row| row["id"] != "throughput_nginx") {
        let measured = &row["measured"];
        assert!(measured["rounds"].as_u64() >= Some(1), "{row}");
        assert!(measured["median"].as_f64() >= Some(0.0), "{row}");
    }
    let count = |pointer: &str| results.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer}"));
    assert_eq!(count("/parts/outages/kills/kills"), 1);
    assert_eq!(count("/parts/outages/kills/refused"), 0, "C1: connections are never refused");
    assert_eq!(count("/parts/outages/kills/failed_otherwise"), 0, "{results:#}");
    assert_eq!(count("/parts/outages/upgrades/failed"), 0, "{results:#}");
    assert!(count("/parts/streams/streams/answered_as_streams") > 0);
    assert!(count("/parts/sessions/sessions") >= 64);
    assert!(count("/parts/sessions/in_memory_after_first_call") <= 1, "nothing is restored that nobody asks for");
    for case in ["JSON, 1 KiB, 2 clients", "JSON, 64 KiB, 2 clients", "SSE, 1 KiB, 2 clients"] {
        for way in ["direct", "pass-through", "mainstay"] {
            let rate = results["parts"]["fast_calls"][case][way]["calls_per_second"]["median"].as_f64();
            assert!(rate > Some(0.0), "{case}, {way}: {results:#}");
        }
    }
    assert!(results["machine"]["cores"].as_u64() >= Some(1));
    assert!(read("results.md").lines().filter(|line| line.starts_with("| ")).count() > ROWS.len());
    assert!(read("README.md").contains(read("results.md").trim()));
    assert!(read("throughput.svg").contains("mainstay"));
}

const ROWS: [&str; 19] = [
    "throughput",
    "throughput_nginx",
    "latency_p50",
    "latency_p99",
    "cpu",
    "fast_commits",
    "memory",
    "start",
    "kill_refused",
    "kill_failed",
    "blackout_p50",
    "blackout_p99",
    "upgrade",
    "creation",
    "creation_handshakes",
    "streamed_p50",
    "streamed_p99",
    "streamed_rate",
    "children",
];
