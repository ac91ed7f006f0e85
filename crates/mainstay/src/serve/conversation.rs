//! Modern requests to servers that need sessions: checked as those that are passed on, and served through a conversation
//! (E3).

mod tasks;

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use http::header::HeaderMap;
use http::{Response, StatusCode};
use mainstay_core::code::Code;
use mainstay_core::wire::envelope::{Kind, Span, member, result_message, unescape, walk};
use mainstay_core::wire::method::Method;
use mainstay_core::wire::modern::hearing::{self, Wanted};
use mainstay_core::wire::modern::{self as era, Meta, crossing};

use crate::engine::call::Request;
use crate::engine::conversation::{Course, Held, Landed, Listener, Parked, Turn, Wish};
use crate::engine::live::Entry;
use crate::engine::modern::attendance::Attending;
use crate::engine::modern::cut_off;
use crate::engine::stream::{KEEP_ALIVE, STILL_HERE};
use crate::engine::{Caller, Refused, Served};
use crate::serve::Front;
use crate::serve::conversation::tasks::Deed;
use crate::serve::mcp::take_opening;
use crate::serve::modern::{self, Fault};
use crate::serve::reply::{self, Answer};

/// Answers a modern `request` of `caller`, who is at `peer`. Whatever is wrong with it is an answer, too.
pub(super) async fn answer(
    front: &Arc<Front>,
    peer: IpAddr,
    (caller, served): (&Caller, &Served),
    headers: &HeaderMap,
    (request, meta): (&Request, &Meta),
    attending: Attending,
) -> Response<Answer> {
    if let Err(fault) = checked(headers, request, meta) {
        return fault.response(&request.id());
    }
    let brought = match front.engine.brought(caller, served, request) {
        Ok(brought) => brought,
        Err(text) => return Fault::bad(era::INVALID_PARAMS, text).response(&request.id()),
    };
    // Nothing that the revision lets a client notify of concerns a legacy server: closing a response is what cancels.
    if request.envelope.kind == Kind::Notification {
        return reply::empty(StatusCode::ACCEPTED);
    }
    let method = request.envelope.method_name(&request.message).unwrap_or_default();
    if let Some(deed) = Deed::of(&method) {
        return tasks::answer(front, (caller, served), (request, meta), deed, attending).await;
    }
    let serving = match brought {
        Some(Held::Parked(parked)) => go_on(front, (caller, served), (request, meta), parked, attending).await,
        Some(Held::Anew) if !has_visited(request) => Err(not_visited(served)),
        Some(Held::Anew) | None => begin(front, peer, (caller, served), headers, (request, meta), attending).await,
    };
    match serving {
        Ok(response) => response,
        Err(refused) => modern::refuse(front, served, &refused, &request.id()),
    }
}

/// Goes on with a call that waits for what the client brings.
async fn go_on(
    front: &Arc<Front>,
    (caller, served): (&Caller, &Served),
    (request, meta): (&Request, &Meta),
    parked: Parked,
    attending: Attending,
) -> Result<Response<Answer>, Refused> {
    let course = front.engine.travel_on(caller, served, (request, meta), parked).await?;
    Ok(respond(front, course, attending).await)
}

async fn begin(
    front: &Arc<Front>,
    peer: IpAddr,
    (caller, served): (&Caller, &Served),
    headers: &HeaderMap,
    (request, meta): (&Request, &Meta),
    attending: Attending,
) -> Result<Response<Answer>, Refused> {
    let wish = Wish::of(caller, served, handle(headers)?, request, meta);
    let engine = &front.engine;
    let opening = Arc::clone(front);
    let may_open = move || take_opening(&opening, peer);
    let entry = engine.converse(caller, served, &wish, may_open).await?;
    if request.method == Method::Discover {
        return discover(front, &entry, request);
    }
    if modern::is_listen(request) {
        return listen(front, &entry, request, attending).await;
    }
    let course = engine.travel((caller, served), &entry, (request, meta)).await?;
    drop(entry);
    Ok(respond(front, course, attending).await)
}

/// The response of a request that is under way: JSON if it has nothing else to say, a stream if it does or takes its time.
async fn respond(front: &Arc<Front>, course: Course, attending: Attending) -> Response<Answer> {
    let end = Box::pin(Arc::clone(&front.engine).cut(Arc::clone(course.live())));
    let mut streaming = Streaming { course, end, first: None, _attending: attending };
    match tokio::time::timeout(FIRST_TURN_MAX, streaming.turn()).await {
        Ok(Turn::Response(landed)) => return landed_response(landed),
        Ok(first @ Turn::Notification(_)) => streaming.first = Some(first),
        Err(_elapsed) => {}
    }
    reply::streaming(streaming.chunks())
}

/// Whether the client says that it has visited all that the server wanted it to.
fn has_visited(request: &Request) -> bool {
    let (message, envelope) = (&request.message, &request.envelope);
    let answers = envelope.params.as_ref().and_then(|params| member(message, params, "inputResponses"));
    let accepts = |answer: &Span| {
        member(message, answer, "action").is_some_and(|action| unescape(&message[action]).as_deref() == Some("accept"))
    };
    answers.is_none_or(|answers| walk::members(message, &answers).all(|(_, answer)| accepts(&answer)))
}

fn not_visited(served: &Served) -> Refused {
    let text = "the server wants its user to visit addresses first, and that was declined";
    Refused { server: Some(served.server.name.clone()), ..Refused::new(Code::ServerRejected, text) }
}

/// What is wrong with a request by itself: what is wrong anywhere, and methods that the revision has not.
fn checked(headers: &HeaderMap, request: &Request, meta: &Meta) -> Result<(), Fault> {
    modern::checked(headers, request, meta)?;
    let method = request.envelope.method_name(&request.message).unwrap_or_default();
    let no_task = method.starts_with(TASKS) && Deed::of(&method).is_none();
    let is_unknown = crossing::is_legacy_only(&method) || no_task;
    if request.envelope.kind == Kind::Request && is_unknown {
        return Err(Fault::no_method(format!("there is no method `{method}` here in {}", era::VERSION)));
    }
    Ok(())
}

/// What the client calls itself towards the gateway, so that it finds its conversation again.
fn handle(headers: &HeaderMap) -> Result<Option<&str>, Refused> {
    let mut values = headers.get_all(CLIENT_HANDLE).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let named = value.to_str().ok().map(str::trim).filter(|name| (1..=HANDLE_BYTES_MAX).contains(&name.len()));
    match named.filter(|_| values.next().is_none()) {
        Some(named) => Ok(Some(named)),
        None => {
            let text = format!("`X-Mainstay-Client` must be one name of 1 to {HANDLE_BYTES_MAX} visible characters");
            Err(Refused::new(Code::RequestInvalid, text))
        }
    }
}

/// What the server said of itself at the begin of the conversation, in words of this era.
fn discover(front: &Arc<Front>, entry: &Entry, request: &Request) -> Result<Response<Answer>, Refused> {
    let said = front.engine.introduced(entry).ok_or_else(|| {
        let text = "the server is down, and it is not known yet what it can do";
        Refused { server: Some(entry.server.name.clone()), ..Refused::new(Code::ServerUnreachable, text) }
    })?;
    let message = result_message(&request.id(), &crossing::discovery(&said));
    Ok(reply::json(StatusCode::OK, message.into()))
}

/// A stream of what the server says unasked, as long as both sides want.
async fn listen(
    front: &Arc<Front>,
    entry: &Entry,
    request: &Request,
    attending: Attending,
) -> Result<Response<Answer>, Refused> {
    let Some(wanted) = Wanted::of(&request.message, &request.envelope) else {
        let fault = Fault::bad(era::INVALID_PARAMS, "`params.notifications` is not an object".to_owned());
        return Ok(fault.response(&request.id()));
    };
    let listener = front.engine.listen_in(entry, request.id(), wanted).await?;
    let engine = Arc::clone(&front.engine);
    let end = Box::pin(async move { engine.stopped().await });
    let listened = Listened { listener, id: request.id(), end, _attending: attending };
    Ok(reply::streaming(listened.chunks()))
}

/// A stream that is listened to. Dropped with its response.
struct Listened {
    listener: Listener,
    id: Bytes,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    _attending: Attending,
}

impl Listened {
    fn chunks(self) -> impl Stream<Item = Bytes> + Send {
        futures_util::stream::unfold(Some(self), |listened| async move {
            let mut listened = listened?;
            let (chunk, goes_on) = listened.next().await;
            Some((chunk, goes_on.then_some(listened)))
        })
    }

    /// The next part of the response, and whether more may come. It ends in order, so that the client listens again.
    async fn next(&mut self) -> (Bytes, bool) {
        let said = tokio::select! {
            biased;
            said = self.listener.next() => said,
            () = self.end.as_mut() => None,
            () = tokio::time::sleep(KEEP_ALIVE) => return (STILL_HERE, true),
        };
        match said {
            Some(message) => (modern::event(&message), true),
            None => (modern::event(&hearing::end(&self.id)), false),
        }
    }
}

fn landed_response(landed: Landed) -> Response<Answer> {
    match landed.refusal {
        Some(code) => modern::failed(code, None, landed.message),
        None => modern::whole(landed.status, landed.message),
    }
}

/// A request whose answer takes its time. Dropped with its response, which cancels it.
struct Streaming {
    course: Course,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// What came before it was known that the response is a stream.
    first: Option<Turn>,
    _attending: Attending,
}

impl Streaming {
    fn chunks(self) -> impl Stream<Item = Bytes> + Send {
        futures_util::stream::unfold(Some(self), |streaming| async move {
            let mut streaming = streaming?;
            let (chunk, goes_on) = streaming.next().await;
            Some((chunk, goes_on.then_some(streaming)))
        })
    }

    /// The next part of the response, and whether more may come.
    async fn next(&mut self) -> (Bytes, bool) {
        let turn = match self.first.take() {
            Some(first) => Ok(first),
            None => tokio::time::timeout(KEEP_ALIVE, self.turn()).await,
        };
        match turn {
            Ok(Turn::Notification(message)) => (modern::event(&message), true),
            Ok(Turn::Response(landed)) => (modern::event(&landed.message), false),
            Err(_elapsed) => (STILL_HERE, true),
        }
    }

    /// What the request brings next, or what is said of it at the end of this worker. Cancel-safe.
    async fn turn(&mut self) -> Turn {
        tokio::select! {
            biased;
            turn = self.course.next() => turn,
            () = self.end.as_mut() => {
                let refused = cut_off(&self.course.live().server);
                Turn::Response(self.course.leave(&refused))
            }
        }
    }
}

/// By what a client tells its conversations from those of others that have the same principal and name.
const CLIENT_HANDLE: &str = "x-mainstay-client";
const HANDLE_BYTES_MAX: usize = 128;
/// How long the head of a response waits for what it is to say: the status of a method that the server does not know is
/// another one, and what has nothing to say but its response needs no stream.
const FIRST_TURN_MAX: Duration = Duration::from_secs(5);
/// What the methods of all dialects of tasks begin with.
const TASKS: &str = "tasks/";

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn e3_a_handle_is_one_usable_name_or_none() {
        let named = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CLIENT_HANDLE, HeaderValue::from_str(value).expect("a value"));
            }
            handle(&headers).map(|handle| handle.map(str::to_owned)).map_err(|refused| refused.code)
        };
        assert_eq!(named(&[]), Ok(None));
        assert_eq!(named(&["window 2"]), Ok(Some("window 2".to_owned())));
        for bad in [["", ""].as_slice(), &[""], &["a", "b"], &["x".repeat(129).as_str()]] {
            assert_eq!(named(bad), Err(Code::RequestInvalid), "{bad:?}");
        }
    }
}
