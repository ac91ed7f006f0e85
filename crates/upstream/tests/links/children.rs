//! Children: spoken to, killed, and handed from worker to worker.

use std::collections::HashSet;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mainstay_core::supervise::Phase;
use mainstay_keeper::ProcessIdentity;
use mainstay_keeper::client::ChildEvent;
use mainstay_upstream::{
    Answer, Ending, Failure, Handshake, Incoming, Link, ListsChanged, Notice, Outcome, Reach, Server, dismiss,
    parse_label,
};
use serde_json::{Value, json};

use crate::fake::big;
use crate::play::{Stage, perform};
use crate::support::{
    BOUND, Bench, EPOCH, eventually, handshake, record_of, request, routed, routed_of, stretched, text, tool, tool_of,
    whole,
};

/// Each test is a scenario that a worker plays.
macro_rules! scenarios {
    ($($name:ident => $play:path),* $(,)?) => {
        $(#[test] fn $name() { perform(stringify!($name)); })*

        /// Plays the scenario of that name.
        pub(crate) async fn play(name: &str, stage: Stage) {
            match name {
                $(stringify!($name) => $play(stage).await,)*
                _ => panic!("there is no scenario {name}"),
            }
        }
    };
}

scenarios! {
    c5_a_child_is_told_initialize_initialized_and_then_the_calls => speaks,
    r7_what_a_child_says_finds_its_owner => owners,
    ac_08_large_and_noisy_answers_leave_the_child_alone => large,
    ac_07_1_a_killed_child_is_noticed_and_the_next_is_brought_to_where_it_was => killed,
    c3_a_call_that_the_child_never_had_goes_to_the_next_one => never_had,
    u5_a_safe_call_is_repeated_on_the_next_child => repeated,
    ac_07_3_children_that_do_not_stay_up_are_not_started_all_the_time => unstable,
    c5_a_restart_by_an_operator_lets_calls_finish_and_is_told => restarted,
    c4_a_program_that_is_missing_is_not_tried_all_the_time => unstartable,
    i6_what_a_child_was_given_is_not_in_its_last_words => indiscreet,
    ac_07_4_a_child_that_never_speaks_is_an_error_with_its_last_words => mute,
    ac_07_5_progress_does_not_extend_the_handshake => endless,
    c8_the_answer_to_an_earlier_workers_call_arrives => handed_over,
    c8_an_answer_that_came_early_is_parked => parked,
    c8_what_was_delivered_just_now_comes_again_and_what_was_delivered_before_does_not => acknowledged,
    r4_the_call_of_a_child_that_died_is_an_unknown_outcome => died,
    r4_a_call_that_never_reached_the_keeper_is_not_waited_for => never_written,
    r4_an_answer_that_nobody_has_taken_outlives_its_worker => untaken,
    r4_an_answer_that_was_taken_is_not_kept => taken,
    r4_a_call_whose_caller_went_away_is_settled => left,
    r4_too_many_untaken_answers_do_not_hold_up_the_child => crowded,
    c9_the_child_of_another_definition_is_ended => redefined,
    t5_a_child_ends_with_its_session_and_stays_for_the_next_worker => endings,
    u7_an_abandoned_start_leaves_no_child_behind => abandoned,
    u8_the_child_that_is_being_started_is_the_one_that_a_call_gets => reached,
    c5_what_the_last_worker_did_not_pass_on_of_initialized_the_next_one_does => untold,
    c5_a_record_from_before_a_child_does_not_say_that_it_was_told => outdated,
    u6_a_used_child_of_which_nothing_is_left_is_told_as_lost => forgotten,
    c1_a_child_without_a_session_is_asked_to_end_before_it_is_killed => dismissed,
}

fn bench(stage: &Stage) -> Bench {
    Bench::with(Some(stage.custody.clone()), EPOCH)
}

async fn pid(link: &Link, number: u64) -> u32 {
    let said = text(link, tool(number, "whoami", json!({}))).await.unwrap();
    said.split(' ').next().unwrap().parse().unwrap()
}

fn is_alive(pid: u32) -> bool {
    ProcessIdentity::of(pid).unwrap().is_some()
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

async fn told(stage: &Stage, what: &str) {
    eventually(what, || stage.trace().iter().any(|(_, seen)| seen == what).then_some(())).await;
}

async fn speaks(stage: Stage) {
    let bench = bench(&stage);
    let (link, opened) = bench.open(&Arc::new(stage.server(""))).await.unwrap();
    assert_eq!(&*opened.version, "2025-11-25");
    assert!(link.opened());
    assert_eq!(link.record().unwrap().initialize_result, opened.result);
    link.confirm().await;
    link.confirm().await;
    assert_eq!(text(&link, tool(1, "echo", json!({"text": "hi\n\u{1f980}"}))).await.unwrap(), "hi\n\u{1f980}");
    assert_eq!(stage.last_told(), ["initialize", "notifications/initialized", "tools/call"]);
    // Answers in another order than the questions.
    let calls = (0..40).map(|number| {
        let link = Arc::clone(&link);
        tokio::spawn(async move {
            let said = number.to_string();
            assert_eq!(text(&link, tool(100 + number, "echo", json!({"text": said}))).await.unwrap(), said);
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    let environment = text(&link, tool(2, "env", json!({}))).await.unwrap();
    let names: HashSet<&str> = environment.split(' ').collect();
    assert!(names.contains("PATH") && names.contains("MAINSTAY_CHILD"), "{names:?}");
    assert!(!names.contains("CANARY"), "{names:?}");
    assert!(link.call(tool(3, "whoami", json!({}))).await.is_ok());
}

async fn owners(stage: Stage) {
    let mut bench = bench(&stage);
    let link = bench.ready(&Arc::new(stage.server(""))).await;
    let progress = (0..10).map(|number| {
        let link = Arc::clone(&link);
        tokio::spawn(async move {
            let call = tool(number, "prog", json!({"n": 5}));
            let token =
                serde_json::from_slice::<Value>(&call.message).unwrap()["params"]["_meta"]["progressToken"].clone();
            let (before, _) = whole(link.call(call).await).await.unwrap();
            let steps: Vec<_> = before.iter().map(|message| message["params"]["progress"].as_u64().unwrap()).collect();
            assert_eq!(steps, [1, 2, 3, 4, 5]);
            assert!(before.iter().all(|message| message["params"]["progressToken"] == token));
        })
    });
    for call in progress.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    let (before, _) = whole(link.call(tool(20, "log", json!({}))).await).await.unwrap();
    assert_eq!(before.len(), 1, "{before:?}");
    assert_eq!(before[0]["method"], "notifications/message");
    assert_eq!(bench.message().await["method"], "notifications/tools/list_changed");

    let Answer::Stream(mut stream) = link.call(tool(21, "ask", json!({}))).await.unwrap() else {
        panic!("the question comes before the answer");
    };
    let Incoming::Message(question) = stream.next().await.unwrap() else { panic!("it asks first") };
    let question: Value = serde_json::from_slice(&question).unwrap();
    assert_eq!(question["method"], "sampling/createMessage");
    let reply = json!({"jsonrpc": "2.0", "id": question["id"], "result": {"text": "because"}});
    link.send(reply.to_string().into()).await.unwrap();
    let (_, response) = whole(Ok(Answer::Stream(stream))).await.unwrap();
    assert_eq!(response["result"]["content"][0]["text"], "because");
    assert_eq!(text(&link, tool(22, "pinged", json!({}))).await.unwrap(), "{}");

    // Two calls under one id at the same time can't both be right.
    let held = tool(23, "hold", json!({"file": "go"}));
    let second = Arc::clone(&link);
    let copy = held.clone();
    let first = tokio::spawn(async move { text(&second, copy).await });
    eventually("the first", || {
        (stage.trace().iter().filter(|(_, what)| what == "tools/call").count() == 14).then_some(())
    })
    .await;
    assert!(matches!(link.call(held).await, Err(Failure::Protocol { .. })));
    stage.write("go", "");
    assert_eq!(first.await.unwrap().unwrap(), "waited");
}

async fn large(stage: Stage) {
    let bench = bench(&stage);
    let server = Server { message_bytes_max: 12 * 1024 * 1024, ..stage.server("") };
    let link = bench.ready(&Arc::new(server)).await;
    let before = pid(&link, 1).await;
    const MEBIBYTE: usize = 1024 * 1024;
    assert!(text(&link, tool(2, "big", json!({"bytes": 8 * MEBIBYTE}))).await.unwrap() == big(8 * MEBIBYTE));
    // Above the limit of the server, and above what the keeper keeps.
    for (number, mebibytes) in [(3, 13), (4, 18)] {
        let (large, small) = tokio::join!(
            text(&link, tool(number, "big", json!({"bytes": mebibytes * MEBIBYTE}))),
            text(&link, tool(10 + number, "echo", json!({"text": "small"}))),
        );
        assert!(matches!(large, Err(Failure::Oversize { .. })), "{mebibytes}");
        assert_eq!(small.unwrap(), "small");
    }
    assert_eq!(text(&link, tool(5, "noise", json!({}))).await.unwrap(), "done");
    assert_eq!(pid(&link, 6).await, before);
}

async fn killed(stage: Stage) {
    let mut bench = bench(&stage);
    let link = bench.ready(&Arc::new(stage.server(""))).await;
    whole(link.call(request(&routed(1), "tools/list", &json!({}))).await).await.unwrap();
    link.remember_level("debug".into());
    link.remember_subscription("file:///x".into());
    let first = pid(&link, 2).await;
    let held = Arc::clone(&link);
    let call = tokio::spawn(async move { text(&held, tool(3, "hold", json!({"file": "never"}))).await });
    eventually("the call", || {
        (stage.trace().iter().filter(|(_, what)| what == "tools/call").count() == 2).then_some(())
    })
    .await;
    kill(first);
    let began = Instant::now();
    let failure = call.await.unwrap().unwrap_err();
    assert!(began.elapsed() < stretched(Duration::from_secs(2)));
    assert_eq!(failure.outcome(), Outcome::Unknown);
    assert!(failure.to_string().contains("signal 9"), "{failure}");

    // Nobody is started only to hear the news.
    let news = json!({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}).to_string();
    assert!(link.send(news.into()).await.unwrap_err().is_unreachable());
    let second = text(&link, tool(4, "whoami", json!({}))).await.unwrap();
    assert!(second.ends_with(" debug,file:///x") && !second.starts_with(&first.to_string()), "{second}");
    let told = stage.last_told();
    let expected = [
        "initialize",
        "notifications/initialized",
        "logging/setLevel",
        "resources/subscribe",
        "tools/list",
        "tools/call",
    ];
    assert_eq!(told[..expected.len()], expected);
    let (reason, lists) = bench.remade().await;
    assert!(reason.contains("signal 9"), "{reason}");
    assert_eq!(lists, ListsChanged::Same);
    assert_eq!(link.record().unwrap().remade_count, 1);
}

async fn never_had(stage: Stage) {
    let bench = bench(&stage);
    let link = bench.ready(&Arc::new(stage.server("deaf"))).await;
    told(&stage, "notifications/initialized").await;
    let deaf = stage.trace()[0].0;
    // More than a pipe takes, so that the child can have neither of the frames whole.
    let said = "y".repeat(1024 * 1024);
    let calls = [1, 2].map(|number| {
        let (link, said) = (Arc::clone(&link), said.clone());
        tokio::spawn(
            async move { assert!(text(&link, tool(number, "echo", json!({"text": said}))).await.unwrap() == said) },
        )
    });
    // Give them the time to be written as far as they can be; nothing tells how far that is.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(calls.iter().all(|call| !call.is_finished()));
    kill(deaf);
    for call in calls {
        call.await.unwrap();
    }
    let calls = stage.trace().into_iter().filter(|(_, what)| what == "tools/call").count();
    assert_eq!((calls, bench.upstreams.counts().repeated), (2, 0));
}

async fn repeated(stage: Stage) {
    let bench = bench(&stage);
    let link = bench.ready(&Arc::new(stage.server(""))).await;
    whole(link.call(request(&routed(1), "tools/list", &json!({}))).await).await.unwrap();
    let first = pid(&link, 2).await;
    let held = Arc::clone(&link);
    let call = tokio::spawn(async move { text(&held, tool(3, "wait", json!({"file": "go"}))).await });
    eventually("the call", || {
        (stage.trace().iter().filter(|(_, what)| what == "tools/call").count() == 2).then_some(())
    })
    .await;
    kill(first);
    stage.write("go", "");
    assert_eq!(call.await.unwrap().unwrap(), "waited");
    assert_ne!(pid(&link, 4).await, first);
    assert_eq!(bench.upstreams.counts().repeated, 1);
}

async fn unstable(stage: Stage) {
    let bench = bench(&stage);
    let server = Arc::new(Server { patience: Duration::from_millis(1500), ..stage.server("") });
    let link = bench.ready(&server).await;
    let mut parked = 0;
    for number in 0..6 {
        match text(&link, tool(number, "die", json!({}))).await.unwrap_err() {
            Failure::OutcomeUnknown { cause, .. } => {
                assert!(cause.contains("status 5") && cause.contains("out of memory"))
            }
            failure @ Failure::Parked { retry_after, .. } => {
                let said = failure.to_string();
                assert!(
                    said.contains("status 5") && said.contains("out of memory") && said.contains("next try"),
                    "{said}"
                );
                assert!(retry_after > Duration::from_millis(1000) && retry_after <= Duration::from_secs(2), "{said}");
                parked += 1;
            }
            other => panic!("{other}"),
        }
    }
    let starts = stage.trace().into_iter().filter(|(_, what)| what == "initialize").count();
    assert_eq!((starts, parked), (3, 3));
    let seen = bench.upstreams.supervised(&server);
    assert_eq!((seen.phase, seen.failures, seen.children.len()), (Phase::BackingOff, 3, 0));
    assert_eq!((seen.counts.up, seen.counts.failed, seen.counts.restarts), (3, 3, 2));
    assert!(seen.ends.iter().all(|end| end.status.code == Some(5) && end.why.is_none()));

    // An operator's word sets it free, whoever asks.
    assert_eq!(bench.upstreams.restart(&server).await, 0);
    assert!(bench.upstreams.supervised(&server).phase == Phase::Open);
    assert_eq!(text(&link, tool(9, "echo", json!({}))).await.unwrap(), "ok");
}

async fn restarted(stage: Stage) {
    let mut bench = bench(&stage);
    let server = Arc::new(Server { stop_grace: Duration::from_millis(500), ..stage.server("") });
    let link = bench.ready(&server).await;
    let first = pid(&link, 1).await;
    // A call that is answered in time is answered by the old one, and what comes meanwhile by the new one.
    let held = Arc::clone(&link);
    let call = tokio::spawn(async move { text(&held, tool(2, "hold", json!({"file": "go"}))).await });
    eventually("the call", || {
        (stage.trace().iter().filter(|(_, what)| what == "tools/call").count() == 2).then_some(())
    })
    .await;
    let (upstreams, restarting) = (Arc::clone(&bench.upstreams), Arc::clone(&server));
    let restart = tokio::spawn(async move { upstreams.restart(&restarting).await });
    let next = Arc::clone(&link);
    // Whoever asks before the restart has begun is still answered by the old one.
    let later = tokio::spawn(async move {
        let mut number = 3;
        loop {
            match pid(&next, number).await {
                pid if pid == first => number += 1,
                pid => return pid,
            }
        }
    });
    stage.write("go", "");
    assert_eq!(call.await.unwrap().unwrap(), "waited");
    assert_eq!(restart.await.unwrap(), 1);
    tokio::time::timeout(BOUND, later).await.unwrap().unwrap();
    assert!(!is_alive(first));
    assert!(bench.remade().await.0.contains("restarted by an operator"));
    let seen = bench.upstreams.supervised(&server);
    assert_eq!((seen.failures, seen.counts.stopped, seen.counts.restarts, seen.children.len()), (0, 1, 1, 1));
    assert!(seen.ends[0].why == Some(mainstay_upstream::Why::Restart) && seen.last_failure.is_none());
}

async fn unstartable(stage: Stage) {
    let bench = bench(&stage);
    let reach = Reach::Child { program: "/no/such/program".into(), args: Vec::new(), env: Vec::new(), cwd: None };
    let server = Arc::new(Server { patience: Duration::ZERO, ..crate::support::server(reach) });
    for _ in 0..2 {
        assert!(matches!(bench.open(&server).await, Err(Failure::Configuration { .. })));
    }
    // Whose session asks does not matter.
    let failure = bench.open(&server).await.unwrap_err();
    assert!(matches!(failure, Failure::Parked { .. }) && failure.to_string().contains("/no/such/program"), "{failure}");
    assert_eq!(bench.upstreams.supervised(&server).counts.not_started, 2);
}

async fn indiscreet(stage: Stage) {
    let bench = bench(&stage);
    let mut server = stage.server("");
    let script = "echo token is $TOKEN, level is $LEVEL >&2; exit 3";
    server.reach = Reach::Child {
        program: "sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![
            ("TOKEN".to_owned(), crate::support::template("Bearer ${SECRET}")),
            ("LEVEL".to_owned(), crate::support::template("debug")),
        ],
        cwd: None,
    };
    bench.variables.set("SECRET", "canary-4711");
    let server = Arc::new(server);
    let failure = bench.open(&server).await.unwrap_err().to_string();
    assert!(failure.contains("token is ***, level is debug") && !failure.contains("canary"), "{failure}");
    let seen = format!("{:?}", bench.upstreams.supervised(&server));
    assert!(seen.contains("token is ***") && !seen.contains("canary"), "{seen}");
}

async fn mute(stage: Stage) {
    let bench = bench(&stage);
    let began = Instant::now();
    let failure = bench.open(&Arc::new(stage.server("exit-before-output"))).await.unwrap_err();
    assert!(began.elapsed() < stretched(Duration::from_secs(5)));
    let Failure::ChildExited { exit, stderr_tail, .. } = &failure else { panic!("{failure}") };
    assert_eq!(exit.code, Some(3));
    assert!(stderr_tail.contains("cannot open the database"), "{stderr_tail}");
    assert!(failure.to_string().contains("exited with status 3"), "{failure}");

    let missing = |program: &str, cwd: Option<&str>| {
        let (program, cwd) = (program.into(), cwd.map(Into::into));
        Arc::new(crate::support::server(Reach::Child { program, args: Vec::new(), env: Vec::new(), cwd }))
    };
    for server in [missing("/no/such/program", None), missing("cat", Some("/no/such/directory"))] {
        let failure = bench.open(&server).await.unwrap_err();
        assert!(matches!(failure, Failure::Configuration { .. }), "{failure}");
        assert!(failure.to_string().contains("/no/such/"), "{failure}");
    }
}

async fn endless(stage: Stage) {
    let bench = bench(&stage);
    let server = Server {
        handshake_bound: Duration::from_millis(500),
        stop_grace: Duration::from_millis(200),
        ..stage.server("progress-forever")
    };
    let began = Instant::now();
    let failure = bench.open(&Arc::new(server)).await.unwrap_err();
    assert!(failure.is_unreachable(), "{failure}");
    assert!(began.elapsed() < stretched(Duration::from_secs(2)));
    let pid = stage.trace()[0].0;
    eventually("its end", || (!is_alive(pid)).then_some(())).await;
}

/// The first worker dies in the middle of a call; the second takes the child over.
async fn take_over(mut stage: Stage) -> (Bench, Stage, Arc<Link>) {
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        let _call = tokio::spawn(async move { text(&link, tool(1, "hold", json!({"file": "go"}))).await });
        told(&stage, "tools/call").await;
        std::process::abort();
    }
    let bench = Bench::with(Some(stage.custody.clone()), EPOCH + 1);
    let server = Arc::new(stage.server(""));
    let held = stage.held.pop().unwrap();
    assert!(stage.held.is_empty());
    let label = parse_label(&held.label).unwrap();
    assert_eq!((label.session, label.definition), (handshake().key, server.definition()));
    assert_eq!((label.server.as_str(), held.identity.pid()), ("srv", stage.trace()[0].0));
    let record = Some(record_of(&server, true));
    let handshake = Handshake { confirmed: true, ..handshake() };
    let link = Link::restore(&bench.upstreams, &server, handshake, record, Some(held), bench.sender.clone());
    assert!(link.opened());
    (bench, stage, link)
}

async fn handed_over(stage: Stage) {
    let (mut bench, stage, link) = take_over(stage).await;
    let Some(Answer::Stream(stream)) = link.rejoin(&routed_of(EPOCH, 1)) else { panic!("it is still to come") };
    assert!(link.rejoin(&routed_of(EPOCH, 1)).is_none());
    assert!(link.rejoin(&routed_of(EPOCH + 1, 1)).is_none());
    stage.write("go", "");
    let (_, response) = whole(Ok(Answer::Stream(stream))).await.unwrap();
    assert_eq!(response["result"]["content"][0]["text"], "waited");
    // New calls meet the same process, which was told everything once.
    assert_eq!(text(&link, tool_of(EPOCH + 1, 2, "echo", json!({}))).await.unwrap(), "ok");
    assert_eq!(stage.last_told(), ["initialize", "notifications/initialized", "tools/call", "tools/call"]);
    assert!(bench.waiting().is_empty());
}

async fn parked(stage: Stage) {
    let (_bench, stage, link) = take_over(stage).await;
    stage.write("go", "");
    told(&stage, "answered hold").await;
    // What is answered later comes later.
    assert_eq!(text(&link, tool_of(EPOCH + 1, 2, "echo", json!({}))).await.unwrap(), "ok");
    let Some(Answer::Whole(response)) = link.rejoin(&routed_of(EPOCH, 1)) else { panic!("it has come") };
    let response: Value = serde_json::from_slice(&response).unwrap();
    assert_eq!(response["result"]["content"][0]["text"], "waited");
    // Whoever asks again gets it again, until somebody has taken it.
    assert!(link.rejoin(&routed_of(EPOCH, 1)).is_some());
    link.settle(&routed_of(EPOCH, 1));
    assert!(link.rejoin(&routed_of(EPOCH, 1)).is_none());
}

async fn died(stage: Stage) {
    let (_bench, stage, link) = take_over(stage).await;
    let Some(Answer::Stream(mut stream)) = link.rejoin(&routed_of(EPOCH, 1)) else { panic!("it is still to come") };
    kill(stage.trace()[0].0);
    let failure = tokio::time::timeout(BOUND, stream.next()).await.unwrap().unwrap_err();
    assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{failure}");
    assert!(link.rejoin(&routed_of(EPOCH, 1)).is_none());
}

async fn never_written(stage: Stage) {
    let (_bench, _stage, link) = take_over(stage).await;
    // The worker before has opened a stream for this one, and died before it wrote the call.
    assert!(link.rejoin(&routed_of(EPOCH, 2)).is_none());
}

/// What a call leaves in custody when its worker dies three seconds after the answer was received.
async fn answered(mut stage: Stage, settles: bool) -> (Bench, Arc<Link>) {
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        let (before, _) = whole(link.call(tool(1, "prog", json!({"n": 1}))).await).await.unwrap();
        assert_eq!(before.len(), 1);
        if settles {
            link.settle(&routed(1));
        }
        // News that is dealt with meanwhile is not kept along with the answer.
        whole(link.call(tool(2, "log", json!({}))).await).await.unwrap();
        link.settle(&routed(2));
        // What is settled is let go one or two seconds later, and nothing tells when.
        tokio::time::sleep(Duration::from_secs(3)).await;
        std::process::abort();
    }
    let bench = Bench::with(Some(stage.custody.clone()), EPOCH + 1);
    let (server, held) = (Arc::new(stage.server("")), stage.held.pop().unwrap());
    assert_eq!(held.open.len(), usize::from(!settles));
    let record = Some(record_of(&server, true));
    let handshake = Handshake { confirmed: true, ..handshake() };
    let link = Link::restore(&bench.upstreams, &server, handshake, record, Some(held), bench.sender.clone());
    // Whatever the keeper kept has come once something later has.
    assert_eq!(text(&link, tool_of(EPOCH + 1, 1, "echo", json!({}))).await.unwrap(), "ok");
    (bench, link)
}

async fn untaken(stage: Stage) {
    let (mut bench, link) = answered(stage, false).await;
    let Some(Answer::Whole(response)) = link.rejoin(&routed_of(EPOCH, 1)) else { panic!("nobody has taken it") };
    let response: Value = serde_json::from_slice(&response).unwrap();
    assert_eq!(response["result"]["content"][0]["text"], "done");
    assert!(link.rejoin(&routed_of(EPOCH, 2)).is_none());
    assert!(bench.waiting().is_empty());
}

async fn taken(stage: Stage) {
    let (_bench, link) = answered(stage, true).await;
    assert!(link.rejoin(&routed_of(EPOCH, 1)).is_none());
}

async fn left(mut stage: Stage) {
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        // One caller goes away before its call is answered, the other before it has read the answer.
        let hold = tool(1, "hold", json!({"file": "go"}));
        assert!(tokio::time::timeout(Duration::from_millis(1), link.call(hold)).await.is_err());
        let Ok(Answer::Stream(unread)) = link.call(tool(2, "prog", json!({"n": 1}))).await else {
            panic!("it has steps")
        };
        drop(unread);
        // What is given up is settled at a tick, and let go two later.
        tokio::time::sleep(Duration::from_secs(4)).await;
        std::process::abort();
    }
    assert_eq!(stage.held.pop().unwrap().open, []);
}

async fn crowded(mut stage: Stage) {
    // More than may stand without being taken, but not more than calls may be open.
    const CALLS: u64 = 3000;
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        for number in 1..=CALLS {
            let Ok(Answer::Whole(_)) = link.call(tool(number, "echo", json!({}))).await else { panic!("it echoes") };
        }
        // What there is no room for is let go one or two seconds later, and nothing tells when.
        tokio::time::sleep(Duration::from_secs(3)).await;
        std::process::abort();
    }
    let open = stage.held.pop().unwrap().open.len();
    assert!((1024..=2048).contains(&open), "{open}");
}

async fn acknowledged(mut stage: Stage) {
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        assert_eq!(text(&link, tool(1, "echo", json!({}))).await.unwrap(), "ok");
        link.settle(&routed(1));
        // What is settled is let go one or two seconds later, and nothing tells when.
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert_eq!(text(&link, tool(2, "echo", json!({}))).await.unwrap(), "ok");
        link.settle(&routed(2));
        std::process::abort();
    }
    let mut held = stage.held.pop().unwrap();
    let event = tokio::time::timeout(BOUND, held.events.recv()).await.unwrap().unwrap();
    let ChildEvent::Frame { bytes, .. } = event else { panic!("{event:?}") };
    let response: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(response["id"], serde_json::from_slice::<Value>(&routed(2).encode()).unwrap());
    assert!(held.events.try_recv().is_err());
}

async fn redefined(mut stage: Stage) {
    if stage.number == 1 {
        let bench = bench(&stage);
        let link = bench.ready(&Arc::new(stage.server(""))).await;
        pid(&link, 1).await;
        std::process::abort();
    }
    let mut bench = Bench::with(Some(stage.custody.clone()), EPOCH + 1);
    let mut server = Server { stop_grace: Duration::from_millis(300), ..stage.server("") };
    if let Reach::Child { env, .. } = &mut server.reach {
        env.push(("ANOTHER".to_owned(), crate::support::template("x")));
    }
    let (held, handshake) = (stage.held.pop().unwrap(), handshake());
    let first = held.identity.pid();
    let handshake = Handshake { confirmed: true, ..handshake };
    let link = Link::restore(&bench.upstreams, &Arc::new(server), handshake, None, Some(held), bench.sender.clone());
    assert_ne!(pid(&link, 2).await, first);
    assert!(bench.remade().await.0.contains("definition"));
    eventually("the first one's end", || (!is_alive(first)).then_some(())).await;
}

async fn endings(stage: Stage) {
    let bench = bench(&stage);
    let server = Arc::new(Server { stop_grace: Duration::from_millis(500), ..stage.server("") });
    let link = bench.ready(&server).await;
    let first = pid(&link, 1).await;
    assert_eq!(link.end(Ending::Delete).await, None);
    eventually("its end", || (!is_alive(first)).then_some(())).await;
    assert!(matches!(text(&link, tool(2, "echo", json!({}))).await, Err(Failure::Ended { .. })));

    let link = bench.ready(&server).await;
    let second = pid(&link, 3).await;
    assert_eq!(link.end(Ending::KeepForResume).await, None);
    assert!(matches!(text(&link, tool(4, "echo", json!({}))).await, Err(Failure::Ended { .. })));
    drop(link);
    assert!(is_alive(second));
}

async fn abandoned(stage: Stage) {
    let mut bench = bench(&stage);
    let server = Arc::new(Server { stop_grace: Duration::from_millis(500), ..stage.server("") });
    let link = bench.lazy(&server);
    assert!(tokio::time::timeout(Duration::from_millis(1), link.reach()).await.is_err());
    told(&stage, "initialize").await;
    link.end(Ending::Delete).await;
    let pid = stage.trace()[0].0;
    eventually("its end", || (!is_alive(pid)).then_some(())).await;
    assert!(bench.waiting().iter().all(|notice| matches!(notice, Notice::Record(_) | Notice::Opened(_))));
}

async fn reached(stage: Stage) {
    let mut bench = bench(&stage);
    let link = bench.lazy(&Arc::new(stage.server("")));
    let reaching = Arc::clone(&link);
    let reached = tokio::spawn(async move { reaching.reach().await });
    link.confirm().await;
    pid(&link, 1).await;
    assert_eq!(reached.await.unwrap().unwrap(), link.reach().await.unwrap());
    assert_eq!(stage.last_told(), ["initialize", "notifications/initialized", "tools/call"]);
    let openings = bench.waiting().into_iter().filter(|notice| matches!(notice, Notice::Opened(_))).count();
    assert_eq!(openings, 1);
}

/// The first worker dies before it has passed on `initialized`; the second has `record`, and its first call is made.
async fn half_told(mut stage: Stage, record: impl FnOnce(&Server) -> mainstay_core::resume::ResumeRecord) -> Stage {
    if stage.number == 1 {
        let bench = bench(&stage);
        let (_link, _) = bench.open(&Arc::new(stage.server(""))).await.unwrap();
        std::process::abort();
    }
    let mut bench = Bench::with(Some(stage.custody.clone()), EPOCH + 1);
    let (server, held) = (Arc::new(stage.server("")), stage.held.pop().unwrap());
    let (record, handshake) = (Some(record(&server)), Handshake { confirmed: true, ..handshake() });
    let link = Link::restore(&bench.upstreams, &server, handshake, record, Some(held), bench.sender.clone());
    pid(&link, 2).await;
    assert_eq!(stage.last_told(), ["initialize", "notifications/initialized", "tools/call"]);
    let told = bench.notice(|notice| match notice {
        Notice::Record(record) => Some(record.told),
        _ => None,
    });
    assert!(told.await);
    stage
}

async fn untold(stage: Stage) {
    half_told(stage, |server| record_of(server, false)).await;
}

async fn outdated(stage: Stage) {
    let old = mainstay_core::time::Timestamp::from_unix_millis(1);
    half_told(stage, |server| mainstay_core::resume::ResumeRecord { saved_at: old, ..record_of(server, true) }).await;
}

async fn forgotten(stage: Stage) {
    let mut bench = bench(&stage);
    let link = bench.restore(&Arc::new(stage.server("")), None);
    pid(&link, 1).await;
    assert_eq!(&*bench.remade().await.0, "what was known of its session is lost");
    assert!(!bench.waiting().iter().any(|notice| matches!(notice, Notice::Opened(_))));
}

async fn dismissed(mut stage: Stage) {
    if stage.number == 1 {
        let bench = bench(&stage);
        pid(&*bench.ready(&Arc::new(stage.server(""))).await, 1).await;
        std::process::abort();
    }
    let held = stage.held.pop().unwrap();
    let first = held.identity.pid();
    dismiss(&stage.custody, held).await;
    assert!(!is_alive(first));
    told(&stage, "ended by itself").await;
}
