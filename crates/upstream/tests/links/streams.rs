//! Answers that come as events, and answers that are too large.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_upstream::{Answer, Failure, Incoming, Position, Server};
use serde_json::json;

use crate::fake::{Fake, Gap, Style, big};
use crate::support::{BOUND, Bench, eventually, request, routed, stretched, text, tool, whole};

#[tokio::test]
async fn r3_an_answer_in_one_event_is_whole() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Events);
    let link = bench.ready(&fake.server()).await;
    for number in 1..=20 {
        let answer = link.call(tool(number, "echo", json!({"text": "hi"}))).await.unwrap();
        assert!(matches!(answer, Answer::Whole(_)), "{answer:?}");
    }
}

#[tokio::test]
async fn r7_progress_comes_before_the_answer_and_in_order() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    for style in [Style::Events, Style::Polling] {
        fake.set(|state| state.style = style);
        let link = bench.ready(&fake.server()).await;
        let (before, response) = whole(link.call(tool(1, "prog", json!({"n": 5}))).await).await.unwrap();
        let steps: Vec<_> = before.iter().map(|message| message["params"]["progress"].as_u64().unwrap()).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5], "{style:?}");
        assert_eq!(response["result"]["content"][0]["text"], "done");
    }
    assert_eq!(fake.executed("prog"), 2);
    // Each of the six messages of the polled stream came by a GET of its own.
    assert_eq!(fake.count("GET"), 6);
}

#[tokio::test]
async fn r4_a_poll_that_nobody_waits_for_goes_on_where_it_was() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Polling);
    let link = bench.ready(&fake.server()).await;
    let Answer::Stream(mut stream) = link.call(tool(1, "prog", json!({"n": 3}))).await.unwrap() else {
        panic!("it has messages before its answer");
    };
    let mut seen = Vec::new();
    // A caller that looks away all the time neither loses a message nor makes a request twice.
    let got = tokio::time::timeout(BOUND, async {
        loop {
            match tokio::time::timeout(Duration::from_millis(3), stream.next()).await {
                Err(_) => {}
                Ok(Ok(Incoming::Message(message))) => seen.push(message),
                Ok(Ok(Incoming::Reached)) => {}
                Ok(Ok(Incoming::Response(_))) => return,
                Ok(Err(failure)) => panic!("{failure}"),
            }
        }
    });
    got.await.unwrap();
    assert_eq!((seen.len(), fake.count("GET"), fake.executed("prog")), (3, 4, 1));
    assert!(matches!(stream.next().await, Err(Failure::Ended { .. })));
}

#[tokio::test]
async fn r4_a_later_worker_goes_on_behind_the_cursor() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Polling);
    let link = bench.ready(&fake.server()).await;
    let call = tool(1, "prog", json!({"n": 3}));
    let Answer::Stream(mut stream) = link.call(call.clone()).await.unwrap() else {
        panic!("it has messages before its answer");
    };
    while !matches!(stream.next().await.unwrap(), Incoming::Message(_)) {}
    let Some(Position::EventId(cursor)) = stream.position() else { panic!("it gives event ids") };
    let cursor = cursor.to_owned();
    let record = link.record().unwrap();
    drop((stream, link));

    let later = Bench::new();
    let link = later.restore(&fake.server(), Some(record));
    let stream = link.resume(call, &cursor).await.unwrap();
    let (before, _) = whole(Ok(Answer::Stream(stream))).await.unwrap();
    assert_eq!(before.len(), 2);
    assert_eq!((fake.executed("prog"), fake.count("initialize")), (1, 1));
}

#[tokio::test]
async fn u5_a_stream_without_ids_that_is_cut_is_repeated_only_if_safe() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Events);
    let link = bench.ready(&fake.server()).await;
    fake.set(|state| state.gaps.push(Gap::CutEvents(2)));
    let began = Instant::now();
    let failure = whole(link.call(tool(1, "prog", json!({"n": 3}))).await).await.unwrap_err();
    assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{failure}");
    assert!(began.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(fake.executed("prog"), 1);

    fake.set(|state| state.tools = vec![json!({"name": "prog", "annotations": {"idempotentHint": true}})]);
    whole(link.call(request(&routed(2), "tools/list", &json!({}))).await).await.unwrap();
    fake.set(|state| state.gaps.push(Gap::CutEvents(2)));
    let (before, response) = whole(link.call(tool(3, "prog", json!({"n": 3}))).await).await.unwrap();
    assert_eq!((before.len(), &response["result"]["content"][0]["text"]), (5, &json!("done")));
    assert_eq!(fake.executed("prog"), 3);
}

#[tokio::test]
async fn r4_a_stream_that_can_not_be_resumed_is_an_unknown_outcome() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Polling);
    let link = bench.ready(&fake.server()).await;
    let Answer::Stream(mut stream) = link.call(tool(1, "prog", json!({"n": 3}))).await.unwrap() else {
        panic!("it has messages before its answer");
    };
    stream.next().await.unwrap();
    fake.forget();
    let failure = whole(Ok(Answer::Stream(stream))).await.unwrap_err();
    assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{failure}");
    assert!(failure.to_string().contains("404"), "{failure}");
    // The next call is not spoilt.
    fake.set(|state| state.style = Style::Json);
    assert_eq!(text(&link, tool(2, "incr", json!({}))).await.unwrap(), "ok");
}

#[tokio::test]
async fn r7_a_ping_within_an_answer_is_answered_by_the_link() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    fake.set(|state| state.style = Style::Events);
    let link = bench.ready(&fake.server()).await;
    let (before, _) = whole(link.call(tool(1, "pinged", json!({}))).await).await.unwrap();
    assert!(before.is_empty(), "{before:?}");
    let pong = json!({"jsonrpc": "2.0", "id": "srv-ping", "result": {}});
    eventually("the pong", || fake.look(|state| state.log.iter().any(|seen| seen.body == pong)).then_some(())).await;
}

#[tokio::test]
async fn ac_08_large_answers_arrive_byte_identical() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let link = bench.ready(&fake.server()).await;
    const BYTES: usize = 8 * 1024 * 1024;
    for style in [Style::Json, Style::Events] {
        fake.set(|state| state.style = style);
        let got = text(&link, tool(1, "big", json!({"bytes": BYTES}))).await.unwrap();
        assert!(got == big(BYTES), "{style:?}");
    }
}

#[tokio::test]
async fn ac_08_an_answer_above_the_limit_fails_its_own_call_only() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let server = Server { message_bytes_max: 64 * 1024, ..Server::clone(&fake.server()) };
    let link = bench.ready(&Arc::new(server)).await;
    for style in [Style::Json, Style::Events] {
        fake.set(|state| state.style = style);
        let (large, small) = tokio::join!(
            text(&link, tool(1, "big", json!({"bytes": 80 * 1024}))),
            text(&link, tool(2, "echo", json!({"text": "small", "ms": 50}))),
        );
        assert!(matches!(large, Err(Failure::Oversize { .. })), "{style:?}");
        assert_eq!(small.unwrap(), "small");
        assert_eq!(text(&link, tool(3, "big", json!({"bytes": 40 * 1024}))).await.unwrap(), big(40 * 1024));
    }
    assert_eq!(fake.count("initialize"), 1);
}
