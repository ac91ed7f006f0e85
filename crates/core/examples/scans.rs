//! Runs one of the scanners over a message of 1 KiB as often as it is told to, and nothing else: `bench/tests/instructions.rs`
//! counts its instructions. Usage: `scans NAME TIMES`.

use std::hint::black_box;
use std::process::ExitCode;

use mainstay_core::wire::envelope::{member, scan, splice};
use mainstay_core::wire::lines::LineSplitter;
use mainstay_core::wire::sse::{SseDecoder, encode};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (name, times) = (arguments.next(), arguments.next().and_then(|times| times.parse::<u32>().ok()));
    let (Some(name), Some(times)) = (name, times) else { return ExitCode::FAILURE };
    // As JSON has it in the field: mostly plain text, now and then an escape.
    let text = "The quick brown fox jumps over the lazy dog.\\n".repeat(22);
    let message = format!(
        r#"{{"jsonrpc":"2.0","id":100000,"method":"tools/call","params":{{"name":"echo","arguments":{{"bytes":1024,"text":"{text}"}}}}}}"#
    )
    .into_bytes();
    let Ok(envelope) = scan(&message) else { return ExitCode::FAILURE };
    let (Some(id), Some(params)) = (envelope.id, envelope.params) else { return ExitCode::FAILURE };
    let (mut event, mut line) = (Vec::new(), message.clone());
    encode(&mut event, Some("s.1.7"), None, &message);
    line.push(b'\n');
    let mut found = 0_usize;
    for _ in 0..times {
        found += match name.as_str() {
            "scan" => scan(black_box(&message)).map_or(0, |envelope| envelope.result.map_or(1, |span| span.end)),
            "member" => member(black_box(&message), &params, "_meta").map_or(1, |span| span.start),
            "splice" => splice(black_box(&message), &[(id.clone(), b"\"7.19.100000\"")]).len(),
            "event" => {
                let mut decoder = SseDecoder::new(1 << 20);
                decoder.push(black_box(&event));
                decoder.next_event().ok().flatten().and_then(|event| event.data).map_or(0, |data| data.len())
            }
            "line" => {
                let mut splitter = LineSplitter::new(1 << 20);
                splitter.push(black_box(&line));
                splitter.next_line().map_or(0, |line| size_of_val(&line))
            }
            _ => return ExitCode::FAILURE,
        };
    }
    if black_box(found) >= times as usize { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
