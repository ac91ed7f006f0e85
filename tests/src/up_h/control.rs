//! The second port: orders and the journal.
//!
//! | route | body | does |
//! |---|---|---|
//! | `POST /forget` | `{after_initialized: N, keep_streams: bool}`? | drops all sessions now, or each of the next N as soon as it is complete |
//! | `POST /dialect` | `{preset}` or `{status, headers, content_type, body}`, `when: unknown|always` | how an unknown id is answered |
//! | `POST /gap` | `{kind, ms, events, code, times, tool, method}` | faults for the next requests; `refuse`, `accept`, `cut_all`, `clear` act at once |
//! | `POST /answer` | `{mode: json\|sse\|sse-with-ids, retry_ms}` | how requests are answered |
//! | `POST /get` | `{status, second: takeover\|conflict, close: bool}` | how a GET is answered |
//! | `POST /post` | `{status}` | how UP-L answers a POST to its event stream |
//! | `POST /endpoint` | `{data}`, `{bytes}` or `{kind}` | how UP-L's event streams begin |
//! | `POST /delete` | `{status}` | how a DELETE is answered |
//! | `POST /ids` | `{issue: bool}` | whether sessions get ids |
//! | `POST /auth` | `{bearer, forget: bool}` | which token is demanded |
//! | `POST /late` | `{events}` | how many events `prog` sends after its response |
//! | `POST /lists` | `{page}` | how many tools a page of `tools/list` has |
//! | `POST /notify` | `{method, params}` | sends a notification to every session |
//! | `POST /send` | `{message}` | sends any message to every session |
//! | `POST /list_changed` | | adds a tool and says so |
//! | `POST /log` | `{pause: bool, clear: bool}` | journal kept or not |
//! | `GET /log?since=N` | | entries, counters, sessions, whether the port listens |
//! | `GET /counters` | | the same without entries |

use super::dialect::{Dialect, json_response};
use super::gap::Gap;
use super::legacy::First;
use super::port::PortOrder;
use super::{Mode, Orders, Response, SecondStream, UpH};
use http::{Method, Request};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Takes orders until the listener fails.
pub(super) async fn serve(up: Arc<UpH>, listener: TcpListener) -> std::io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        let up = Arc::clone(&up);
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let up = Arc::clone(&up);
                async move { Ok::<Response, Infallible>(route(&up, request).await) }
            });
            let _ended =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

async fn route(up: &UpH, request: Request<Incoming>) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = Limited::new(body, ORDER_BYTES_MAX).collect().await else {
        return json_response(400, &json!({"error": "the order could not be read"}));
    };
    let raw = body.to_bytes();
    let order = if raw.is_empty() { json!({}) } else { serde_json::from_slice(&raw).unwrap_or(Value::Null) };
    let done = match (&parts.method, parts.uri.path()) {
        (&Method::GET, "/log") => Ok(show(up, Some(since(parts.uri.query())))),
        (&Method::GET, "/counters") => Ok(show(up, None)),
        (&Method::POST, path) if order.is_object() => obey(up, path, &order).await,
        _ => Err("no such order".to_owned()),
    };
    match done {
        Ok(answer) => json_response(200, &answer),
        Err(error) => json_response(400, &json!({"error": error})),
    }
}

async fn obey(up: &UpH, path: &str, order: &Value) -> Result<Value, String> {
    match path {
        "/forget" => match order["after_initialized"].as_u64() {
            Some(sessions) => up.orders().forget_after_initialized = sessions,
            None if order["keep_streams"] == true => return Ok(json!({"forgotten": up.sessions.forget_quietly()})),
            None => return Ok(json!({"forgotten": up.sessions.forget()})),
        },
        "/gap" => return gap(up, order).await,
        "/get" => get(up, order)?,
        "/auth" => {
            up.orders().bearer = order["bearer"].as_str().map(str::to_owned);
            if order["forget"] == true {
                up.sessions.forget();
            }
        }
        "/late" => up.world.send_late_events(whole_number(order, "events")?),
        "/lists" => up.world.page_lists_by(whole_number(order, "page")?),
        "/notify" => {
            let method = order["method"].as_str().ok_or("no method")?;
            up.world.tell_all(method, &order["params"]).await;
        }
        "/send" => up.sessions.all().iter().for_each(|session| session.listening.push(&order["message"])),
        "/list_changed" => {
            let tool = up.world.add_tool();
            up.world.tell_all("notifications/tools/list_changed", &Value::Null).await;
            return Ok(json!({"tool": tool}));
        }
        "/log" => {
            up.journal.pause(order["pause"] == true);
            if order["clear"] == true {
                up.journal.clear();
            }
        }
        other => set(&mut up.orders(), other, order)?,
    }
    Ok(json!({}))
}

/// Orders that only change how later requests are answered.
fn set(orders: &mut Orders, path: &str, order: &Value) -> Result<(), String> {
    match path {
        "/dialect" => orders.dialect = Dialect::read(order)?,
        "/ids" => orders.issue_ids = order["issue"].as_bool().ok_or("no issue")?,
        "/delete" => orders.delete_status = status(order)?,
        "/post" => orders.post_status = status(order)?,
        "/endpoint" => orders.first = First::read(order)?,
        "/answer" => {
            orders.mode = match order["mode"].as_str() {
                Some("json") => Mode::Json,
                Some("sse") => Mode::Sse,
                Some("sse-with-ids") => Mode::SseWithIds,
                _ => return Err("no such mode".to_owned()),
            };
            orders.retry_ms = order["retry_ms"].as_u64().unwrap_or(orders.retry_ms);
        }
        _ => return Err(format!("no order `{path}`")),
    }
    Ok(())
}

fn get(up: &UpH, order: &Value) -> Result<(), String> {
    if !order["status"].is_null() {
        up.orders().get_status = status(order)?;
    }
    match order["second"].as_str() {
        None => {}
        Some("takeover") => up.orders().second_stream = SecondStream::TakesOver,
        Some("conflict") => up.orders().second_stream = SecondStream::Conflicts,
        Some(other) => return Err(format!("no such `second`: `{other}`")),
    }
    if order["close"] == true {
        up.sessions.all().iter().for_each(|session| session.listening.dismiss());
    }
    Ok(())
}

async fn gap(up: &UpH, order: &Value) -> Result<Value, String> {
    match order["kind"].as_str() {
        Some("refuse") => {
            let time = order["ms"].as_u64().map(Duration::from_millis);
            up.port.order(PortOrder::Refuse(time)).await;
        }
        Some("accept") => up.port.order(PortOrder::Accept).await,
        Some("cut_all") => up.port.order(PortOrder::CutAll).await,
        Some("clear") => up.orders().gaps.clear(),
        _ => {
            let gap = Gap::read(order)?;
            let gaps = &mut up.orders().gaps;
            if gaps.len() >= GAPS_MAX {
                return Err("too many gaps".to_owned());
            }
            gaps.push(gap);
        }
    }
    Ok(json!({}))
}

fn show(up: &UpH, since: Option<u64>) -> Value {
    let counted = up.world.counted().to_json();
    let mut shown = up.journal.counters();
    if let (Some(shown), Value::Object(counted)) = (shown.as_object_mut(), counted) {
        shown.extend(counted);
        let sessions = up.sessions.all();
        let streams: u64 = sessions.iter().map(|session| session.listening.followers()).sum();
        shown.insert("sessions".to_owned(), json!(sessions.len()));
        shown.insert("listening_streams".to_owned(), json!(streams));
        shown.insert("gaps_left".to_owned(), json!(up.orders().gaps.len()));
        shown.insert("listening".to_owned(), json!(up.port.listening()));
    }
    match since {
        Some(since) => json!({"counters": shown, "entries": up.journal.entries(since)}),
        None => shown,
    }
}

fn since(query: Option<&str>) -> u64 {
    let number = query.and_then(|query| query.strip_prefix("since="));
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn whole_number(order: &Value, name: &str) -> Result<u64, String> {
    order[name].as_u64().ok_or_else(|| format!("no {name}"))
}

fn status(order: &Value) -> Result<u16, String> {
    let status = whole_number(order, "status")?;
    u16::try_from(status)
        .ok()
        .filter(|status| (200..600).contains(status))
        .ok_or_else(|| format!("no status: {status}"))
}

const ORDER_BYTES_MAX: usize = 1024 * 1024;
const GAPS_MAX: usize = 1000;
