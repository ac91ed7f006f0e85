use mainstay_store::Place;
use mainstay_store::keys::Keyring;

use super::*;
use crate::engine::stream::log::{LOG_BYTES_MAX, LOG_EVENTS_MAX};

fn stream() -> Arc<Stream> {
    Stream::new(7, StreamId { epoch: 3, number: 9 }, Some(Bytes::from_static(b"42")), None)
}

async fn rest(mut reader: Reader) -> String {
    let mut text = String::new();
    while let Some(chunk) = reader.next().await {
        text.push_str(std::str::from_utf8(&chunk).expect("ascii"));
    }
    text
}

#[tokio::test]
async fn r1_a_stream_is_primed_with_an_id_and_a_retry() {
    let stream = stream();
    stream.finish(Message::essential(Bytes::from_static(b"{}")));
    let text = rest(stream.read(None, None)).await;
    assert_eq!(text, "id: 00000007-3-9-0-NDI\nretry: 4000\ndata: \n\nid: 00000007-3-9-1f-NDI\ndata: {}\n\n",);
}

#[tokio::test]
async fn r2_a_resumed_reader_goes_on_exactly_after_its_event() {
    let stream = stream();
    for message in ["1", "2", "3"] {
        stream.push(Message::passing(Bytes::from(message)));
    }
    stream.close();
    let text = rest(stream.read(Some(2), Some("00000007-3-9-2-NDI".into()))).await;
    assert_eq!(text, "id: 00000007-3-9-2-NDI\nretry: 4000\ndata: \n\nid: 00000007-3-9-3-NDI\ndata: 3\n\n");
}

#[tokio::test]
async fn r5_a_second_reader_takes_over_and_the_first_ends() {
    let stream = stream();
    let mut first = stream.read(None, None);
    assert!(first.next().await.is_some(), "primed");
    stream.push(Message::passing(Bytes::from_static(b"1")));
    assert!(first.next().await.is_some());
    let mut second = stream.read(None, None);
    assert_eq!(first.next().await, None);
    stream.push(Message::passing(Bytes::from_static(b"2")));
    assert!(second.next().await.is_some(), "primed");
    assert_eq!(second.next().await.expect("an event"), "id: 00000007-3-9-2-NDI\ndata: 2\n\n");
}

#[tokio::test]
async fn s18_a_client_of_2024_11_05_is_told_its_endpoint_first_and_everything_is_a_message_event() {
    let stream = Stream::new(7, StreamId { epoch: 3, number: 0 }, None, None);
    let first = stream.place(Message::essential(Bytes::from_static(b"{}")));
    assert_eq!((first, stream.unread()), (Some(1), (1, 2)));
    let mut reader = stream.read(None, None).in_http_sse(Some("/mcp/x/sse?a=b".into()));
    let told = reader.next().await.expect("the endpoint");
    assert_eq!(told, "event: endpoint\nid: 00000007-3-0-0\nretry: 4000\ndata: /mcp/x/sse?a=b\n\n");
    let event = reader.next().await.expect("the message");
    assert_eq!(event, "event: message\nid: 00000007-3-0-1\ndata: {}\n\n");
    assert!(stream.taken(1).await);
    assert_eq!(stream.unread(), (0, 0));
    let mut again = stream.read(Some(0), None).in_http_sse(None);
    assert_eq!(again.next().await.expect("no second endpoint"), event);
    stream.close();
    assert_eq!(stream.place(Message::essential(Bytes::new())), None);
    assert!(!stream.taken(2).await, "nothing was lost in silence");
}

#[tokio::test]
async fn s18_r4_what_a_connection_was_sent_and_did_not_live_to_take_is_sent_again_to_a_client_without_a_cursor() {
    let stream = Stream::new(7, StreamId { epoch: 3, number: 0 }, None, None);
    stream.keep_all();
    stream.push(Message::passing(Bytes::from_static(b"1")));
    stream.push(Message::essential(Bytes::from_static(b"2")));
    let mut dying = stream.read(None, None).in_http_sse(None);
    let sent = "event: message\nid: 00000007-3-0-1\ndata: 1\n\nevent: message\nid: 00000007-3-0-2\ndata: 2\n\n";
    assert_eq!(dying.next().await.expect("both"), sent);
    assert_eq!(stream.unread(), (0, 0), "it is not in the way of others");
    drop(dying);
    let mut next = stream.read(None, None).in_http_sse(None);
    let again = "event: message\nid: 00000007-3-0-2\ndata: 2\n\n";
    assert_eq!(next.next().await.expect("what somebody waits for"), again);
    let is_taken = tokio::select! {
        taken = stream.taken(2) => taken,
        more = next.next() => panic!("{more:?}"),
    };
    assert!(is_taken, "once the connection has lived on");
    stream.push(Message::essential(Bytes::from_static(b"3")));
    let mut last = stream.read(None, None).in_http_sse(None);
    assert!(last.next().await.expect("what is new").ends_with(b"data: 3\n\n"));
    drop(last);
    let named = stream.read(Some(3), None).in_http_sse(None);
    drop(named);
    stream.push(Message::essential(Bytes::from_static(b"4")));
    let mut last = stream.read(None, None).in_http_sse(None);
    let what_is_not_named = "event: message\nid: 00000007-3-0-4\ndata: 4\n\n";
    assert_eq!(last.next().await.expect("what is new"), what_is_not_named, "whoever names an event has it");
    last.confirm_all();
    stream.close();
    assert_eq!(stream.read(None, None).in_http_sse(None).next().await, None, "an end in order");
}

#[test]
fn r1_a_small_event_keeps_nothing_of_the_buffer_that_it_came_in() {
    let stream = stream();
    let buffer = Bytes::from(vec![b' '; 1 << 16]);
    stream.push(Message::passing(buffer.slice(..100)));
    assert!(buffer.is_unique());
}

#[tokio::test]
async fn r1_the_log_is_bounded_and_never_drops_the_last_message() {
    let stream = stream();
    for _ in 0..LOG_EVENTS_MAX + 10 {
        stream.push(Message::passing(Bytes::from_static(b"progress")));
    }
    stream.finish(Message::essential(Bytes::from(vec![b'x'; LOG_BYTES_MAX + 1])));
    assert_eq!(stream.dropped(), LOG_EVENTS_MAX as u64 + 10);
    assert!(rest(stream.read(None, None)).await.len() > LOG_BYTES_MAX);
}

#[test]
fn r4_what_the_journal_refuses_waits_for_what_it_has_taken_and_no_longer() {
    let stream = stream();
    let mut log = stream.log.lock();
    // Events 1 and 4 are taken, 2, 3 and 5 refused at once.
    log.refused.extend([2, 3, 5]);
    log.settle(0);
    assert_eq!(log.settled_through, 0, "nothing overtakes");
    log.settle(1);
    assert_eq!(log.settled_through, 3);
    log.settle(4);
    assert_eq!((log.settled_through, log.refused.len()), (5, 0), "the response goes out");
}

#[tokio::test]
async fn r4_no_response_is_ever_dropped_for_want_of_room() {
    let stream = stream();
    for _ in 0..5 {
        stream.push(Message::essential(Bytes::from(vec![b'x'; LOG_BYTES_MAX / 2])));
        stream.push(Message::passing(Bytes::from_static(b"progress")));
    }
    stream.close();
    assert!(!stream.is_delivered());
    let text = rest(stream.read(None, None)).await;
    assert!(text.len() > 5 * (LOG_BYTES_MAX / 2), "all five are there");
    assert!(stream.is_delivered());
}

#[tokio::test]
async fn e3_a_reader_of_messages_goes_on_where_it_is_and_yields_to_the_next() {
    let stream = stream();
    stream.push(Message::passing(Bytes::from_static(b"1")));
    stream.push(Message::passing(Bytes::from_static(b"2")));
    let mut first = stream.read(Some(0), None);
    assert_eq!(first.next_message().await, Some((1, Bytes::from_static(b"1"))));
    let mut second = stream.read(Some(1), None);
    assert_eq!(first.next_message().await, None);
    stream.finish(Message::essential(Bytes::from_static(b"3")));
    assert_eq!(second.next_message().await, Some((2, Bytes::from_static(b"2"))));
    assert_eq!(second.next_message().await, Some((3, Bytes::from_static(b"3"))));
    assert_eq!(second.next_message().await, None);
    assert!(stream.is_delivered());
}

#[tokio::test]
async fn c8_what_a_first_reader_finds_on_a_listening_stream_is_kept_before_it_is_sent() {
    let (clock, session) = (Clock::system(), SessionKey::from_bytes([1; 32]));
    let ring = Arc::new(Keyring::ephemeral(&mut |bytes| bytes.fill(1)));
    let journal = Journal::open(Place::Memory, ring).expect("a journal");
    let claim = Epoch { counter: 3, nonce: 1 };
    let journaled = Journaled { journal: journal.clone(), session, claim, clock };
    let id = StreamId { epoch: 3, number: StreamId::LISTEN };
    let stream = Stream::new(7, id, None, Some(journaled));
    for number in 1..=3 {
        stream.push(Message::passing(Bytes::from_static(b"{}")).from_source(Some(Source::Frame(number))));
    }
    let kept = async || {
        let events = journal.replay(session, id, 0, 9).await.expect("it is there");
        events.into_iter().map(|event| (event.sequence, event.source)).collect::<Vec<_>>()
    };
    assert_eq!(kept().await, [], "nobody listens");
    let mut reader = stream.read(None, None);
    let expected = [1, 2, 3].map(|number| (number, Some(Source::Frame(number))));
    assert_eq!(kept().await, expected);
    assert!(reader.next().await.is_some(), "primed");
    assert_eq!(reader.next().await.expect("the events").iter().filter(|byte| **byte == b'{').count(), 3);
    stream.push(Message::passing(Bytes::from_static(b"{}")));
    drop(stream.read(None, None));
    assert_eq!(kept().await.len(), 4, "each once");
}
