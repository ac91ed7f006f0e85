//! How many instructions the scanners take for a message of 1 KiB: what no load of the machine changes. Counted by
//! `valgrind --tool=callgrind`; where that is not installed nothing is counted, and the test says so.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

#[test]
fn the_scanners_take_no_more_instructions_than_they_did() {
    let found = Command::new(VALGRIND).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        // As in `nginx`'s place: what is not there is not measured.
        return eprintln!("{VALGRIND} is not installed: instructions are not counted");
    }
    let program = scans();
    let mut over = Vec::new();
    for (name, most) in BOUNDS {
        let each = (counted(&program, name, 2 * TIMES) - counted(&program, name, TIMES)) / u64::from(TIMES);
        eprintln!("{name}: {each} instructions");
        if each > most {
            over.push(format!("{name}: {each} instructions, at most {most}"));
        }
        assert!(each > MESSAGE_BYTES / 32, "{name}: {each} instructions can't be all of it");
    }
    assert!(over.is_empty(), "{}", over.join("; "));
}

/// The program that scans, optimised as the gateway is.
fn scans() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(&root).args(["build", "--release", "--locked", "--quiet", "--package", "mainstay-core"]);
    let built = build.args(["--example", "scans"]).status().expect("cargo starts");
    assert!(built.success(), "the program is not built");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |target| root.join(target));
    target.join("release/examples/scans")
}

/// The instructions of a whole run.
fn counted(program: &Path, name: &str, times: u32) -> u64 {
    let mut command = Command::new(VALGRIND);
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program).arg(name).arg(times.to_string());
    let output = command.stdin(Stdio::null()).output().expect("valgrind starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {said}");
    let line = said.lines().find_map(|line| line.split_once("Collected :")).expect("a count");
    line.1.trim().parse().expect("a number")
}

const VALGRIND: &str = "valgrind";
const TIMES: u32 = 400;
const MESSAGE_BYTES: u64 = 1024;
/// What each takes now, and a tenth more.
const BOUNDS: [(&str, u64); 5] = [("scan", 9760), ("member", 7800), ("splice", 665), ("event", 2600), ("line", 1232)];
