//! Exit codes: part of the contract with scripts.

/// It is done.
pub(super) const OK: u8 = 0;
/// It was tried and failed.
pub(super) const FAILED: u8 = 1;
/// The command line or the configuration is wrong; nothing was done.
pub(super) const USAGE: u8 = 2;
/// The gateway that the command is for does not run.
pub(super) const NOT_RUNNING: u8 = 3;
/// The gateway runs, and has nothing of that name.
pub(super) const NOT_FOUND: u8 = 4;

/// The same for `--help`.
pub(super) const HELP: &str = "\
Exit codes:
  0  done
  1  tried and failed
  2  the command line or the configuration is wrong
  3  the gateway does not run
  4  nothing of that name";
