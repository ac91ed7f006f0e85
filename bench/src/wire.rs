//! One client's connection, down to its bytes. It is as cheap as can be, for it shares the machine with what it measures:
//! a blocking socket, a request that is built once and only renumbered, an answer that is looked at and not parsed.

use anyhow::{Context as _, Result, bail, ensure};
use memchr::memmem;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::Duration;

/// Where an MCP endpoint is.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Who listens.
    pub(crate) address: SocketAddr,
    /// The path of the endpoint.
    pub(crate) path: String,
}

impl Place {
    pub(crate) fn new(address: SocketAddr, path: &str) -> Place {
        Place { address, path: path.to_owned() }
    }
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Nobody took the connection.
    Refused(std::io::Error),
    /// The connection ended before the answer was whole.
    Cut(std::io::Error),
    /// The answer is none that a call gets.
    Wrong(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Refused(error) => write!(f, "the connection was refused: {error}"),
            Failure::Cut(error) => write!(f, "the connection was cut: {error}"),
            Failure::Wrong(answer) => write!(f, "the answer is wrong: {answer}"),
        }
    }
}

impl std::error::Error for Failure {}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Whether it came as an event stream.
    pub(crate) streamed: bool,
    /// The session that it opens.
    pub(crate) session: Option<String>,
    closes: bool,
    body: Range<usize>,
}

/// A connection that is made when it is needed and kept for as long as the other side keeps it.
#[derive(Debug)]
pub(crate) struct Wire {
    address: SocketAddr,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
    checks: bool,
}

impl Wire {
    pub(crate) fn new(address: SocketAddr) -> Wire {
        Wire { address, stream: None, buffer: Vec::with_capacity(READ_BYTES), checks: false }
    }

    /// The same, but looked at before each request whether the other side has closed it, as clients in the field do.
    pub(crate) fn checked(mut self) -> Wire {
        self.checks = true;
        self
    }

    /// Sends a whole request and reads a whole answer.
    pub(crate) fn exchange(&mut self, request: &[u8]) -> Result<Answer, Failure> {
        let kept = self.stream.take().filter(|stream| !self.checks || is_open(stream));
        let mut stream = match kept {
            Some(stream) => stream,
            None => connect(self.address).map_err(Failure::Refused)?,
        };
        stream.write_all(request).map_err(Failure::Cut)?;
        self.buffer.clear();
        let answer = read_answer(&mut stream, &mut self.buffer)?;
        if !answer.closes {
            self.stream = Some(stream);
        }
        Ok(answer)
    }

    /// The same for a call, of which the result must come. Returns whether it came as an event stream.
    pub(crate) fn call(&mut self, request: &[u8]) -> Result<bool, Failure> {
        let answer = self.exchange(request)?;
        let body = self.buffer.get(answer.body.clone()).unwrap_or_default();
        if answer.status == 200 && memmem::find(body, b"\"result\"").is_some() {
            return Ok(answer.streamed);
        }
        let shown = body.get(..SHOWN_BYTES_MAX).unwrap_or(body);
        Err(Failure::Wrong(format!("{} {}", answer.status, String::from_utf8_lossy(shown))))
    }

    /// Opens a session, as every client does: `initialize`, then `notifications/initialized`.
    pub(crate) fn open(&mut self, place: &Place) -> Result<String> {
        let params =
            r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}"#;
        let initialize = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"initialize","params":{params}}}"#);
        let answer = self.exchange(&post(place, None, &initialize))?;
        ensure!(answer.status == 200, "`initialize` was answered with {}", answer.status);
        let session = answer.session.context("`initialize` opened no session")?;
        let initialized = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
        let answer = self.exchange(&post(place, Some(&session), initialized))?;
        ensure!(answer.status == 202, "`notifications/initialized` was answered with {}", answer.status);
        Ok(session)
    }
}

/// A call of one session. Its bytes are made once; only the number of its id changes.
#[derive(Debug)]
pub(crate) struct Call {
    bytes: Vec<u8>,
    id_at: usize,
    last_id: u64,
}

impl Call {
    /// A call with a text of so many bytes, answered after so long with a text of the same size.
    pub(crate) fn new(place: &Place, session: &str, text_bytes: usize, wait_ms: u64) -> Result<Call> {
        let text = "x".repeat(text_bytes);
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":{FIRST_ID},"method":"tools/call","params":{{"name":"echo","arguments":{{"bytes":{text_bytes},"ms":{wait_ms},"text":"{text}"}}}}}}"#
        );
        let bytes = post(place, Some(session), &body);
        let id = FIRST_ID.to_string();
        let Some(id_at) = memmem::find(&bytes, id.as_bytes()) else {
            bail!("the call has no id");
        };
        Ok(Call { bytes, id_at, last_id: FIRST_ID })
    }

    /// The bytes of the next call: no id is used twice.
    pub(crate) fn next(&mut self) -> &[u8] {
        self.last_id = if self.last_id >= LAST_ID { FIRST_ID } else { self.last_id + 1 };
        let id = self.last_id.to_string();
        if let Some(place) = self.bytes.get_mut(self.id_at..self.id_at + id.len()) {
            place.copy_from_slice(id.as_bytes());
        }
        &self.bytes
    }
}

fn post(place: &Place, session: Option<&str>, body: &str) -> Vec<u8> {
    let session = session.map_or_else(String::new, |session| {
        format!("mcp-session-id: {session}\r\nmcp-protocol-version: 2025-11-25\r\n")
    });
    format!(
        "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\naccept: application/json, text/event-stream\r\n\
         {session}content-length: {}\r\n\r\n{body}",
        place.path,
        place.address,
        body.len()
    )
    .into_bytes()
}

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ANSWER_BOUND))?;
    stream.set_write_timeout(Some(ANSWER_BOUND))?;
    Ok(stream)
}

/// Whether a connection on which nothing is expected is still of use.
fn is_open(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let quiet = looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    quiet && stream.set_nonblocking(false).is_ok()
}

fn read_answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<Answer, Failure> {
    let body_at = loop {
        if let Some(at) = memmem::find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        fill(stream, buffer)?;
    };
    let head = String::from_utf8_lossy(buffer.get(..body_at).unwrap_or_default()).into_owned();
    let header = |name: &str| {
        let mut lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
        lines.find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    };
    let status = head.get(9..12).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| Failure::Wrong(format!("no status: {head}")))?;
    let body = if header("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")) {
        body_at..read_chunks(stream, buffer, body_at)?
    } else {
        let length = header("content-length").and_then(|length| length.parse::<usize>().ok()).unwrap_or(0);
        while buffer.len() < body_at + length {
            fill(stream, buffer)?;
        }
        body_at..body_at + length
    };
    Ok(Answer {
        status,
        streamed: header("content-type").is_some_and(|media| media.starts_with("text/event-stream")),
        session: header("mcp-session-id").map(str::to_owned),
        closes: header("connection").is_some_and(|connection| connection.eq_ignore_ascii_case("close")),
        body,
    })
}

/// Reads chunks to their end and moves what they hold together. Returns where it ends.
fn read_chunks(stream: &mut TcpStream, buffer: &mut Vec<u8>, body_at: usize) -> Result<usize, Failure> {
    let (mut read_at, mut body_end) = (body_at, body_at);
    loop {
        let line_end = loop {
            if let Some(length) = buffer.get(read_at..).and_then(|rest| memmem::find(rest, b"\r\n")) {
                break read_at + length;
            }
            fill(stream, buffer)?;
        };
        let size = buffer.get(read_at..line_end).and_then(|line| std::str::from_utf8(line).ok());
        let size = size.and_then(|line| usize::from_str_radix(line.split(';').next()?.trim(), 16).ok());
        let size = size.ok_or_else(|| Failure::Wrong("a chunk has no size".to_owned()))?;
        let data_at = line_end + 2;
        while buffer.len() < data_at + size + 2 {
            fill(stream, buffer)?;
        }
        if size == 0 {
            return Ok(body_end);
        }
        buffer.copy_within(data_at..data_at + size, body_end);
        body_end += size;
        read_at = data_at + size + 2;
    }
}

fn fill(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Result<(), Failure> {
    let held = buffer.len();
    if held > ANSWER_BYTES_MAX {
        return Err(Failure::Wrong(format!("more than {ANSWER_BYTES_MAX} bytes")));
    }
    buffer.resize(held + READ_BYTES, 0);
    let read = stream.read(buffer.get_mut(held..).unwrap_or_default());
    let read = read.and_then(|bytes| if bytes == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) });
    buffer.truncate(held + read.as_ref().copied().unwrap_or(0));
    read.map(drop).map_err(Failure::Cut)
}

/// All ids have as many digits.
const FIRST_ID: u64 = 1_000_000_000;
const LAST_ID: u64 = 9_999_999_999;
const READ_BYTES: usize = 64 * 1024;
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
const ANSWER_BOUND: Duration = Duration::from_secs(30);
const SHOWN_BYTES_MAX: usize = 300;

#[cfg(test)]
mod tests {
    use super::{Call, Place, Wire};
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    /// Answers the first request with these bytes, in pieces of so many.
    fn answering(bytes: &'static [u8], piece: usize) -> Place {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place::new(listener.local_addr().unwrap(), "/mcp");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let _request = stream.read(&mut [0; 4096]).unwrap();
            bytes.chunks(piece).for_each(|piece| stream.write_all(piece).unwrap());
        });
        place
    }

    #[test]
    fn answers_of_known_length_and_in_chunks_are_read_to_their_end() {
        let plain = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\nMcp-Session-Id: s\r\n\r\n{\"result\":{}}";
        let chunked = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                        7\r\ndata: {\r\nd\r\n\"result\":{}}\n\r\n1\r\n\n\r\n0\r\n\r\n";
        for piece in [1, 3, 7, 1000] {
            for (bytes, streamed) in [(&plain[..], false), (&chunked[..], true)] {
                let place = answering(bytes, piece);
                let mut call = Call::new(&place, "s", 10, 0).unwrap();
                let mut wire = Wire::new(place.address);
                assert_eq!(wire.call(call.next()).unwrap(), streamed, "in pieces of {piece}");
            }
        }
    }

    #[test]
    fn an_answer_that_is_cut_is_a_failure_and_so_is_an_error() {
        for (bytes, what) in [
            (&b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{\"resu"[..], "cut"),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n\"resu", "cut"),
            (b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", "wrong"),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{\"error\":1", "wrong"),
        ] {
            let place = answering(bytes, 1000);
            let mut call = Call::new(&place, "s", 10, 0).unwrap();
            let failed = Wire::new(place.address).call(call.next()).unwrap_err();
            assert!(failed.to_string().contains(what), "{failed}");
        }
    }
}
