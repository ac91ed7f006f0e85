//! What the machine is, and what its kernel counts of a process.

use serde_json::{Value, json};
use std::process::Command;

/// The facts without which a figure means nothing. What can't be found out is null.
pub(crate) fn facts() -> Value {
    let temporary = std::env::temp_dir();
    json!({
        "cpu": cpu(),
        "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        "memory_mib": line_of("/proc/meminfo", "MemTotal:").and_then(|kib| kib.split(' ').next()?.parse::<u64>().ok()).map(|kib| kib >> 10),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "rustc": said("rustc", &["--version"]),
        "disk": said("findmnt", &["--noheadings", "--output", "SOURCE,FSTYPE", "--target", &temporary.to_string_lossy()]),
        "nginx": crate::nginx::Nginx::version(),
        "load_average_before": read("/proc/loadavg").map(|load| load.split(' ').take(3).collect::<Vec<_>>().join(" ")),
    })
}

/// Processor time of all threads of some processes, in microseconds; none if the kernel does not say.
pub(crate) fn cpu_micros(pids: &[u32]) -> Option<f64> {
    let mut nanos = 0_u64;
    for pid in pids {
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
            // A thread may end between being listed and being asked.
            let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else {
                continue;
            };
            nanos += text.split(' ').next()?.parse::<u64>().ok()?;
        }
    }
    Some(nanos as f64 / 1000.0)
}

/// What a process has caused to be written to storage, in bytes; none if the kernel does not say.
pub(crate) fn written_bytes(pid: u32) -> Option<u64> {
    line_of(&format!("/proc/{pid}/io"), "write_bytes:")?.parse().ok()
}

fn cpu() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name") || line.starts_with("CPU implementer"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn line_of(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn said(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (!text.is_empty()).then_some(text)
}
