//! UP-H, the scriptable HTTP upstream: see `mainstay_tests::up_h`. With `--legacy` it is UP-L.

use mainstay_tests::flags::Flags;
use mainstay_tests::server::WorldSettings;
use mainstay_tests::up_h::{Settings, run};
use std::process::ExitCode;

const USAGE: &str = "usage: up-h [--port N] [--control N] [--incr-file FILE] [--name NAME] [--late N] [--protocol V] [--legacy] [--until-stdin-closes]";

fn main() -> ExitCode {
    let outcome = settings().and_then(|(settings, tied)| serve(settings, tied).map_err(|error| error.to_string()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            use std::io::Write as _;
            let _nobody_reads = writeln!(std::io::stderr(), "up-h: {error}\n{USAGE}");
            ExitCode::FAILURE
        }
    }
}

fn settings() -> Result<(Settings, bool), String> {
    let valued = ["port", "control", "incr-file", "name", "late", "protocol"];
    let flags = Flags::read(std::env::args().skip(1), &["legacy", "until-stdin-closes"], &valued)?;
    let world = WorldSettings {
        name: flags.value("name").unwrap_or("up-h").to_owned(),
        incr_file: flags.value("incr-file").map(Into::into),
        protocol: flags.value("protocol").map(str::to_owned),
        late_events: flags.number("late")?.unwrap_or(0),
    };
    let port = flags.number("port")?.unwrap_or(0);
    let control = flags.number("control")?.unwrap_or(0);
    Ok((Settings { port, control, legacy: flags.has("legacy"), world }, flags.has("until-stdin-closes")))
}

/// A server that is tied to its starter ends with it, however the starter ends.
fn serve(settings: Settings, tied: bool) -> std::io::Result<()> {
    if tied {
        std::thread::spawn(|| {
            let _closed = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            std::process::exit(0);
        });
    }
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(run(settings))
}
