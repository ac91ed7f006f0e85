//! The log: structured lines on standard error, for people or as JSON. The numbers are in [`metrics`].
//!
//! Called once per process, by its `main`. What a line may hold is the business of whoever writes it; see the rules in
//! `CONTRIBUTING.md`.

pub mod metrics;

mod distribution;

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people, with colours on a terminal.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The filter is malformed.
    #[error("read the log filter `{filter}`")]
    Filter {
        /// What was given.
        filter: String,
        /// What is wrong with it.
        #[source]
        source: ParseError,
    },
    /// This process has a log already.
    #[error("install the log")]
    Installed(#[source] tracing_subscriber::util::TryInitError),
}

/// Starts the process's log. `filter` is a level or a list of `target=level`.
///
/// # Errors
/// If the filter is malformed, or the process has a log already.
pub fn start(format: Format, filter: &str) -> Result<(), Error> {
    use tracing_subscriber::util::SubscriberInitExt as _;

    let filter = EnvFilter::try_new(filter).map_err(|source| Error::Filter { filter: filter.to_owned(), source })?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        Format::Human => lines.with_ansi(std::io::stderr().is_terminal()).finish().try_init(),
        Format::Json => lines.json().flatten_event(true).finish().try_init(),
    }
    .map_err(Error::Installed)
}

/// The filter where none is given: life-cycle lines of our own, and faults of everybody.
pub const FILTER_DEFAULT: &str = "warn,mainstay=info,mainstay_keeper=info,mainstay_store=info,mainstay_upstream=info";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_filter_is_refused_before_anything_is_installed() {
        let error = start(Format::Human, "mainstay=loud").unwrap_err();
        assert_eq!(error.to_string(), "read the log filter `mainstay=loud`");
        assert!(EnvFilter::try_new(FILTER_DEFAULT).is_ok());
    }
}
