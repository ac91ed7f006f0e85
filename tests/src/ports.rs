//! Ports for programs that must be told one.

use anyhow::Result;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};

/// A free port on loopback below the range from which the system takes ports for outgoing connections: while its user
/// is down, nothing else is given its port. No two calls in one process name the same.
///
/// It is asked for by connecting, never by binding: a process that another test forks at that moment would hold the
/// bound socket until it becomes its own program, and the port's user would find it taken.
///
/// # Errors
/// If none of many is free.
pub fn lasting_port() -> Result<SocketAddr> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let width = PORTS.end - PORTS.start;
    let spread = u16::try_from(std::process::id() % u32::from(width))?;
    for _ in 0..TRIES_MAX {
        let step = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(37).wrapping_add(spread);
        let address = SocketAddr::from(([127, 0, 0, 1], PORTS.start + step % width));
        if TcpStream::connect(address).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            return Ok(address);
        }
    }
    anyhow::bail!("no free port in {PORTS:?}")
}

const PORTS: std::ops::Range<u16> = 10_240..32_000;
const TRIES_MAX: usize = 1000;
