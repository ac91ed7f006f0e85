//! Legacy sessions with modern servers, and finding out which kind a server is.

use std::sync::Arc;

use bytes::Bytes;
use mainstay_core::wire::modern::{Era, Spoken};
use mainstay_upstream::{Answer, Failure, Handshake, Incoming, Link, Server};
use serde_json::{Value, json};

use crate::fake::Fake;
use crate::modern::Modern;
use crate::support::{BOUND, Bench, eventually, handshake, request, routed, text, tool, whole};

fn params(capabilities: &Value) -> Bytes {
    let params = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities,
        "clientInfo": {"name": "tester", "version": "1.0"}});
    Bytes::from(params.to_string())
}

fn link_of(bench: &Bench, server: &Arc<Server>, capabilities: &Value) -> Arc<Link> {
    let handshake = Handshake { params: params(capabilities), confirmed: true, ..handshake() };
    Link::lazy(&bench.upstreams, server, handshake, bench.sender.clone())
}

/// Answers the one question that `answer` begins with, by `reply`, and returns the text that comes of it.
async fn answered(link: &Link, answer: Answer, reply: impl Fn(&Value) -> Value) -> (Value, Value) {
    let Answer::Stream(mut stream) = answer else { panic!("there is no question") };
    let Incoming::Message(question) = stream.next().await.unwrap() else { panic!("there is no question") };
    let question: Value = serde_json::from_slice(&question).unwrap();
    link.send(Bytes::from(reply(&question).to_string())).await.unwrap();
    let Incoming::Response(response) = stream.next().await.unwrap() else { panic!("there is no answer") };
    (question, serde_json::from_slice(&response).unwrap())
}

#[tokio::test]
async fn e1_a_server_that_refuses_initialize_is_found_to_be_modern_and_bridged() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let server = modern.server(None);
    let link = link_of(&bench, &server, &json!({"roots": {}, "tasks": {}}));
    let opened = link.reach().await.unwrap();
    assert_eq!(&*opened.version, "2025-06-18");
    let result: Value = serde_json::from_slice(&opened.result).unwrap();
    assert_eq!((&result["protocolVersion"], &result["serverInfo"]["name"]), (&json!("2025-06-18"), &json!("modern")));
    assert_eq!((modern.count("initialize"), bench.upstreams.spoken(&server)), (1, Spoken::only(Era::Modern)));

    assert_eq!(text(&link, tool(1, "plain", json!({}))).await.unwrap(), "done");
    let call = &modern.seen("tools/call")[0];
    let meta = &call.body["params"]["_meta"];
    assert_eq!(meta["io.modelcontextprotocol/clientCapabilities"], json!({"roots": {}}));
    assert_eq!(meta["io.modelcontextprotocol/clientInfo"], json!({"name": "tester", "version": "1.0"}));
    assert!(meta["progressToken"].is_string() && call.headers.get("mcp-session-id").is_none());

    // What is known is not found out twice.
    let second = link_of(&bench, &server, &json!({}));
    assert_eq!(text(&second, tool(2, "plain", json!({}))).await.unwrap(), "done");
    assert_eq!((modern.count("initialize"), modern.count("notifications/initialized")), (1, 0));
}

#[tokio::test]
async fn e5_a_legacy_server_is_never_asked_for_its_era_by_legacy_traffic() {
    let (bench, fake) = (Bench::new(), Fake::start().await);
    let server = fake.server();
    let link = bench.ready(&server).await;
    assert_eq!(text(&link, tool(1, "incr", json!({}))).await.unwrap(), "ok");
    assert_eq!(fake.methods(), ["initialize", "notifications/initialized", "tools/call"]);
    assert_eq!(bench.upstreams.spoken(&server), Spoken { legacy: Some(true), modern: None });
    assert_eq!(bench.upstreams.era(&server).await, Some(Era::Legacy));
    assert_eq!(bench.upstreams.era(&server).await, Some(Era::Legacy));
    assert_eq!(fake.count("server/discover"), 1);
}

#[tokio::test]
async fn e5_the_era_is_asked_once_and_what_is_configured_or_away_not_at_all() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let server = modern.server(None);
    let (one, two) = tokio::join!(bench.upstreams.era(&server), bench.upstreams.era(&server));
    assert_eq!((one, two, modern.count("server/discover")), (Some(Era::Modern), Some(Era::Modern), 1));
    let told = modern.server(Some(Era::Legacy));
    assert_eq!((bench.upstreams.era(&told).await, modern.count("server/discover")), (Some(Era::Legacy), 1));
    let fake = Fake::start().await;
    let server = fake.server();
    fake.close().await;
    assert_eq!((bench.upstreams.era(&server).await, bench.upstreams.spoken(&server)), (None, Spoken::default()));
}

#[tokio::test]
async fn e1_results_and_errors_are_those_of_the_legacy_era() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let link = link_of(&bench, &modern.server(Some(Era::Modern)), &json!({}));
    let list = whole(link.call(request(&routed(1), "tools/list", &json!({}))).await).await.unwrap().1;
    let names: Vec<_> = list["result"]["tools"].as_array().unwrap().iter().map(|tool| &tool["name"]).collect();
    assert_eq!(names, ["read", "route"]);
    assert_eq!(list["result"].as_object().unwrap().len(), 1, "{list}");
    let unknown = whole(link.call(request(&routed(2), "no/such", &json!({}))).await).await.unwrap().1;
    assert_eq!(unknown["error"]["code"], -32601);
    let level = whole(link.call(request(&routed(3), "logging/setLevel", &json!({"level": "info"}))).await).await;
    assert_eq!(level.unwrap().1["result"], json!({}));
    link.remember_level("info".into());
    let wrong = whole(link.call(request(&routed(4), "logging/setLevel", &json!({"level": "loud"}))).await).await;
    assert_eq!(wrong.unwrap().1["error"]["code"], -32602);
    assert_eq!(text(&link, tool(5, "plain", json!({}))).await.unwrap(), "done");
    let meta = &modern.seen("tools/call")[0].body["params"]["_meta"];
    assert_eq!(meta["io.modelcontextprotocol/logLevel"], "info");
    assert_eq!((modern.count("logging/setLevel"), modern.count("initialize")), (0, 0));
}

#[tokio::test]
async fn e1_refused_headers_are_made_anew_from_the_servers_list() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let link = link_of(&bench, &modern.server(Some(Era::Modern)), &json!({}));
    assert_eq!(text(&link, tool(1, "route", json!({"region": "eu"}))).await.unwrap(), "done");
    assert_eq!((modern.count("tools/call"), modern.count("tools/list")), (2, 1));
    assert_eq!(text(&link, tool(2, "route", json!({"region": "us"}))).await.unwrap(), "done");
    assert_eq!((modern.count("tools/call"), modern.count("tools/list")), (3, 1));
}

#[tokio::test]
async fn e1_a_wish_for_input_is_put_to_the_client_as_a_question() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let link = link_of(&bench, &modern.server(Some(Era::Modern)), &json!({"elicitation": {}, "roots": {}}));
    let answer = link.call(tool(1, "ask", json!({}))).await.unwrap();
    let reply = |question: &Value| json!({"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"name": "me"}}});
    let (question, response) = answered(&link, answer, reply).await;
    assert_eq!((&question["method"], &question["params"]["message"]), (&json!("elicitation/create"), &json!("who?")));
    assert_eq!(response["result"], json!({"content": [{"type": "text", "text": "me s\"1"}]}));
    assert_eq!(response["id"], serde_json::from_slice::<Value>(&tool(1, "ask", json!({})).id).unwrap());
    let calls = modern.seen("tools/call");
    assert_ne!(calls[0].body["id"], calls[1].body["id"]);

    let refused = link.call(tool(2, "roots", json!({}))).await.unwrap();
    let reply =
        |question: &Value| json!({"jsonrpc": "2.0", "id": question["id"], "error": {"code": -1, "message": "not now"}});
    let (_, response) = answered(&link, refused, reply).await;
    assert_eq!(response["result"]["isError"], true);
    assert!(response["result"]["content"][0]["text"].as_str().unwrap().contains("not now"), "{response}");
    // Nobody waits for that any more.
    let late = Bytes::from(reply(&json!({"id": "mainstay.7.1"})).to_string());
    assert!(matches!(link.send(late).await, Err(Failure::LostAgain { .. })));
}

#[tokio::test]
async fn e1_a_client_is_asked_only_for_what_it_declared_and_not_for_ever() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let server = modern.server(Some(Era::Modern));
    let link = link_of(&bench, &server, &json!({}));
    let (_, response) = whole(link.call(tool(1, "ask", json!({}))).await).await.unwrap();
    assert_eq!(response["result"]["isError"], true);
    let prompt = link.call(request(&routed(2), "prompts/get", &json!({"name": "ask"}))).await;
    assert!(matches!(prompt, Err(Failure::Rejected { status: 200, .. })), "{prompt:?}");

    let link = link_of(&bench, &server, &json!({"roots": {}}));
    let Answer::Stream(mut stream) = link.call(tool(3, "again", json!({}))).await.unwrap() else {
        panic!("no question")
    };
    let mut asked = 0;
    let response = loop {
        match stream.next().await.unwrap() {
            Incoming::Message(question) => {
                asked += 1;
                let question: Value = serde_json::from_slice(&question).unwrap();
                let reply = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"roots": []}});
                link.send(Bytes::from(reply.to_string())).await.unwrap();
            }
            Incoming::Reached => {}
            Incoming::Response(response) => break serde_json::from_slice::<Value>(&response).unwrap(),
        }
    };
    assert_eq!((asked, &response["result"]["isError"]), (10, &json!(true)));
}

#[tokio::test]
async fn e1_cancelling_a_call_closes_its_request() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let link = link_of(&bench, &modern.server(Some(Era::Modern)), &json!({}));
    let call = tool(1, "slow", json!({}));
    let id: Value = serde_json::from_slice(&call.id).unwrap();
    let Answer::Stream(mut stream) = link.call(call).await.unwrap() else { panic!("no progress") };
    assert!(matches!(stream.next().await.unwrap(), Incoming::Message(_)));
    assert_eq!(modern.slow(), 1);
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
    link.send(Bytes::from(cancel.to_string())).await.unwrap();
    let waiting = tokio::spawn(async move { stream.next().await.map(drop) });
    eventually("the request to be closed", || (modern.slow() == 0).then_some(())).await;
    assert!(!waiting.is_finished());
    waiting.abort();
    assert_eq!(modern.count("notifications/cancelled"), 0);
}

#[tokio::test]
async fn e1_lists_and_subscriptions_are_listened_to_in_one_stream() {
    let (mut bench, modern) = (Bench::new(), Modern::start().await);
    let link = link_of(&bench, &modern.server(Some(Era::Modern)), &json!({}));
    link.reach().await.unwrap();
    let listening = link.listen();
    eventually("a listener", || (modern.listeners() == 1).then_some(())).await;
    modern.say("notifications/tools/list_changed", &json!({}));
    let heard = bench.message().await;
    assert_eq!((&heard["method"], &heard["params"]["_meta"]), (&json!("notifications/tools/list_changed"), &json!({})));

    let subscribed = whole(link.call(request(&routed(1), "resources/subscribe", &json!({"uri": "a"}))).await).await;
    assert_eq!(subscribed.unwrap().1["result"], json!({}));
    link.remember_subscription("a".into());
    let listens = || modern.seen("subscriptions/listen");
    eventually("another stream", || (listens().len() == 2 && modern.listeners() == 1).then_some(())).await;
    let filter = &listens()[1].body["params"]["notifications"];
    assert_eq!(*filter, json!({"toolsListChanged": true, "resourceSubscriptions": ["a"]}));
    modern.say("notifications/resources/updated", &json!({"uri": "a"}));
    assert_eq!(bench.message().await["params"]["uri"], "a");

    // What was said while nobody listened is not known: the client is told to look.
    modern.hang_up();
    assert_eq!(bench.message().await["method"], "notifications/tools/list_changed");
    assert_eq!(bench.message().await["method"], "notifications/resources/updated");
    drop(listening);
    eventually("nobody to listen", || (modern.listeners() == 0).then_some(())).await;
}

#[tokio::test]
async fn e1_a_bridged_session_is_taken_up_without_a_word_and_nothing_of_it_is_lost() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let server = modern.server(None);
    let link = link_of(&bench, &server, &json!({"roots": {}}));
    link.reach().await.unwrap();
    let record = link.record().unwrap();
    let mut later = Bench::new();
    let link = later.restore(&server, Some(record));
    assert!(link.opened());
    let (seen, calls) = (modern.count("server/discover"), modern.count("initialize"));
    assert_eq!(text(&link, tool(1, "plain", json!({}))).await.unwrap(), "done");
    assert_eq!((modern.count("server/discover"), modern.count("initialize")), (seen, calls));
    assert!(later.waiting().is_empty());
    assert!(link.end(mainstay_upstream::Ending::Delete).await.is_none());
    assert!(matches!(link.call(tool(2, "plain", json!({}))).await, Err(Failure::Ended { .. })));
}

#[tokio::test]
async fn e5_a_server_that_changes_its_era_is_found_out_by_the_next_call_and_runs_it_once() {
    let (bench, modern) = (Bench::new(), Modern::start().await);
    let server = modern.server(None);
    let link = link_of(&bench, &server, &json!({}));
    assert_eq!(text(&link, tool(1, "plain", json!({}))).await.unwrap(), "done");
    modern.set(|state| state.legacy = true);
    assert_eq!(text(&link, tool(2, "plain", json!({}))).await.unwrap(), "legacy");
    assert_eq!(bench.upstreams.spoken(&server).legacy, Some(true));
    modern.set(|state| state.legacy = false);
    // Its session is gone, too: nothing but another `initialize` would tell, and that is refused.
    let again = link_of(&bench, &server, &json!({}));
    let found = tokio::time::timeout(BOUND, text(&again, tool(3, "plain", json!({})))).await.unwrap();
    assert_eq!(found.unwrap(), "done");
}
