//! Where the binaries under test are.

use anyhow::{Context as _, Result, ensure};
use std::path::{Path, PathBuf};

/// The gateway's binary: `$MAINSTAY_BIN` if it is set, else `mainstay` in the profile directory of the running test.
///
/// Cargo tells tests the binaries of their own package only, and builds no other package's. So `mainstay` must have been
/// built first, in the same profile and target directory: `cargo build -p mainstay && cargo test -p mainstay-tests`.
///
/// # Errors
/// If there is no such file.
pub fn mainstay() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MAINSTAY_BIN") {
        return present(PathBuf::from(path), "`MAINSTAY_BIN` must name the gateway's binary");
    }
    beside_tests("mainstay", "build it first: `cargo build -p mainstay`")
}

/// The scriptable HTTP upstream, which Cargo builds with the integration tests of this package.
///
/// # Errors
/// If there is no such file.
pub fn up_h() -> Result<PathBuf> {
    beside_tests("up-h", "build it first: `cargo build -p mainstay-tests`")
}

/// The scriptable stdio upstream, which Cargo builds with the integration tests of this package.
///
/// # Errors
/// If there is no such file.
pub fn up_s() -> Result<PathBuf> {
    beside_tests("up-s", "build it first: `cargo build -p mainstay-tests`")
}

/// The scriptable stateless program, which Cargo builds with the integration tests of this package.
///
/// # Errors
/// If there is no such file.
pub fn up_p() -> Result<PathBuf> {
    beside_tests("up-p", "build it first: `cargo build -p mainstay-tests`")
}

/// The root of the repository.
#[must_use]
pub fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// `target/PROFILE/deps/TEST-HASH` is the test; `target/PROFILE/NAME` the binary.
fn beside_tests(name: &str, hint: &str) -> Result<PathBuf> {
    let test = std::env::current_exe().context("the running test has no path")?;
    let mut profile = test.parent().context("the running test lies nowhere")?;
    if profile.ends_with("deps") {
        profile = profile.parent().context("`deps` lies nowhere")?;
    }
    present(profile.join(name), hint)
}

fn present(path: PathBuf, hint: &str) -> Result<PathBuf> {
    ensure!(path.is_file(), "no file `{}`: {hint}", path.display());
    Ok(path)
}
