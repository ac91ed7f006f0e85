//! nginx as the same hop, if it is installed.

use anyhow::{Context as _, Result, ensure};
use mainstay_tests::{Proc, children, lasting_port, wait_blocking};
use rustix::process::Signal;
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A running nginx with a configuration of its own. It is ended when the handle goes.
#[derive(Debug)]
pub(crate) struct Nginx {
    child: Child,
    pub(crate) address: SocketAddr,
    _dir: TempDir,
}

impl Nginx {
    /// Starts it in front of an address.
    ///
    /// # Errors
    /// Why there is none: it is not installed, or does not serve as it is told to.
    pub(crate) fn start(to: SocketAddr) -> Result<Nginx> {
        let found = Command::new(PROGRAM).arg("-v").stderr(Stdio::null()).status();
        ensure!(found.is_ok_and(|status| status.success()), "nginx is not installed");
        let dir = TempDir::with_prefix("bench-nginx-")?;
        let address = lasting_port()?;
        let config = dir.path().join("nginx.conf");
        std::fs::write(&config, configuration(address, to))?;
        let mut command = Command::new(PROGRAM);
        command.arg("-p").arg(dir.path()).arg("-c").arg(&config);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let mut nginx = Nginx { child, address, _dir: dir };
        let up = wait_blocking(START_BOUND, || TcpStream::connect(address).is_ok() || nginx.has_ended());
        ensure!(up && !nginx.has_ended(), "nginx does not serve: {}", nginx.complaints());
        Ok(nginx)
    }

    /// The process and its workers.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let workers = children(self.child.id()).into_iter().map(|worker| worker.pid);
        std::iter::once(self.child.id()).chain(workers).collect()
    }

    /// What the program calls itself.
    pub(crate) fn version() -> Option<String> {
        let said = Command::new(PROGRAM).arg("-v").output().ok()?.stderr;
        Some(String::from_utf8_lossy(&said).trim().trim_start_matches("nginx version: ").to_owned())
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn complaints(&self) -> String {
        let log = std::fs::read_to_string(self._dir.path().join("error.log")).context("no log");
        log.unwrap_or_else(|error| format!("{error:#}"))
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Its workers are its own to end; only SIGTERM lets it.
        if let Some(process) = Proc::of(self.child.id()) {
            process.signal(Signal::TERM);
        }
        if !wait_blocking(STOP_BOUND, || self.has_ended()) {
            let _already_gone = self.child.kill();
        }
        let _reaped = self.child.wait();
    }
}

/// A hop that keeps its connections, writes nothing and buffers in memory only. As many workers as there are cores: that is
/// what the other hops have. Its workers stay of the user that starts it, whose directory nobody else may enter.
fn configuration(listen: SocketAddr, to: SocketAddr) -> String {
    format!(
        "user root;\ndaemon off;\nworker_processes auto;\npid nginx.pid;\nerror_log error.log warn;\n\
         events {{ worker_connections 4096; }}\n\
         http {{\n  access_log off;\n  client_body_temp_path body;\n  proxy_temp_path proxy;\n  fastcgi_temp_path fastcgi;\n  \
         uwsgi_temp_path uwsgi;\n  scgi_temp_path scgi;\n  client_max_body_size 16m;\n  client_body_buffer_size 2m;\n  \
         proxy_buffer_size 16k;\n  proxy_buffers 8 512k;\n  proxy_busy_buffers_size 1m;\n  proxy_max_temp_file_size 0;\n  \
         keepalive_requests 100000000;\n  tcp_nodelay on;\n  \
         upstream server {{ server {to}; keepalive 256; keepalive_requests 100000000; }}\n  \
         server {{\n    listen {listen};\n    location / {{\n      proxy_pass http://server;\n      proxy_http_version 1.1;\n      \
         proxy_set_header Connection \"\";\n    }}\n  }}\n}}\n"
    )
}

const PROGRAM: &str = "nginx";
const START_BOUND: Duration = Duration::from_secs(10);
const STOP_BOUND: Duration = Duration::from_secs(10);
