use super::*;

const EPOCH: u64 = 7;

fn call(epoch: u64, number: u64) -> RoutedId {
    RoutedId { stream: StreamId { epoch, number }, original: Bytes::from_static(b"\"c\"") }
}

fn raw(id: &RoutedId) -> Bytes {
    id.encode().into()
}

/// A child of which the keeper says that calls 1 and 2 of the epoch before are open.
fn table() -> Table {
    Table::of(&[tag_of(call(EPOCH - 1, 1).stream), tag_of(call(EPOCH - 1, 2).stream)])
}

/// The child answers. Whether it was for anybody.
fn answer(table: &mut Table, number: u64, id: &[u8]) -> bool {
    hear(table, number, [&br#"{"jsonrpc":"2.0","id":"#[..], id, br#","result":{}}"#].concat().into())
}

fn hear(table: &mut Table, number: u64, bytes: Bytes) -> bool {
    let scanned = envelope::scan(&bytes).expect("a response");
    table.acks.arrived(number, bytes.len());
    let placed = table.place_response(number, &scanned, &bytes, EPOCH);
    if !placed {
        table.acks.delivered(number);
    }
    placed
}

fn is_answered(rejoined: Option<Rejoined>) -> Option<bool> {
    rejoined.map(|rejoined| matches!(rejoined, Rejoined::Answered(_)))
}

#[test]
fn r4_tags_lead_back_to_their_streams() {
    for stream in [StreamId { epoch: 1, number: 2 }, StreamId { epoch: u64::MAX, number: u64::MAX - 1 }] {
        assert_eq!(stream_of(tag_of(stream)), stream);
    }
}

#[test]
fn r4_only_open_calls_are_waited_for() {
    let mut table = table();
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 1))), Some(false));
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 1))), None);
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 3))), None);
    assert!(answer(&mut table, 1, &raw(&call(EPOCH - 1, 2))));
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 2))), Some(true));
    assert!(!answer(&mut table, 2, &raw(&call(EPOCH - 1, 3))));
    assert_eq!(table.acks.held().0, 1);
    assert_eq!(table.answered_earlier(), [call(EPOCH - 1, 2).stream]);
    table.settle(call(EPOCH - 1, 2).stream);
    assert_eq!(table.answered_earlier(), []);
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 2))), None);
    assert_eq!(table.acks.held().0, 0);
}

#[test]
fn r4_an_answer_stays_until_its_call_is_settled_and_a_second_one_is_nobodys() {
    let mut table = Table::default();
    let id = call(EPOCH, 1);
    let place = table.register(raw(&id), true).expect("it is new");
    assert!(answer(&mut table, 1, &raw(&id)));
    assert_eq!(place.slot.close(), []);
    assert!(!answer(&mut table, 2, &raw(&id)));
    table.leave(&place, true);
    assert_eq!(table.tick().calls, []);
    assert_eq!(table.acks.held().0, 1);
    table.settle(id.stream);
    let release = table.acks.flush();
    assert_eq!(release.calls, [tag_of(id.stream)]);
    assert_eq!(release.frames(), [1..=2]);
}

#[test]
fn r4_a_caller_that_goes_away_settles_its_call_a_tick_later_and_not_at_the_end_of_the_process() {
    let mut table = Table::default();
    let (unanswered, unread) = (call(EPOCH, 1), call(EPOCH, 2));
    let places = [&unanswered, &unread].map(|id| table.register(raw(id), true).expect("it is new"));
    assert!(answer(&mut table, 1, &raw(&unread)));
    places.iter().for_each(|place| table.leave(place, false));
    assert!(table.acks.flush().is_empty() && table.is_due());
    table.tick();
    let release = table.acks.flush();
    assert_eq!(release.calls, [tag_of(unanswered.stream), tag_of(unread.stream)]);
    assert_eq!(release.frames(), [1..=1]);
}

#[test]
fn r4_whoever_comes_back_under_another_spelling_of_its_id_gets_its_answer() {
    let mut table = table();
    let other = RoutedId { original: Bytes::from_static(b"null"), ..call(EPOCH - 1, 1) };
    let Some(Rejoined::Waiting(place)) = table.rejoin(&other) else { panic!("it is open") };
    assert!(answer(&mut table, 1, &raw(&call(EPOCH - 1, 1))));
    table.finish(End { exit: None, why: None });
    assert_eq!(table.rejoin(&call(EPOCH - 1, 2)).map(|_| ()), None);
    assert_eq!(place.slot.close(), []);
}

/// The child tells of progress. Whether it is kept for somebody who comes back.
fn progress(table: &mut Table, number: u64, token: &[u8]) -> bool {
    let head = br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1,"progressToken":"#;
    let message = Bytes::from([&head[..], token, b"}}"].concat());
    let scanned = envelope::scan(&message).expect("a notification");
    table.acks.arrived(number, message.len());
    assert!(matches!(table.owner_of(&scanned, &message), Owner::Nobody));
    let kept = table.keep_progress(number, &scanned, &message);
    if !kept {
        table.acks.delivered(number);
    }
    kept
}

#[test]
fn r7_c8_progress_waits_in_custody_for_the_client_that_comes_back_and_precedes_the_answer() {
    let mut table = table();
    let (running, answered) = (call(EPOCH - 1, 1), call(EPOCH - 1, 2));
    assert!(progress(&mut table, 1, &raw(&running)) && progress(&mut table, 2, &raw(&running)));
    assert!(progress(&mut table, 3, &raw(&answered)));
    assert!(answer(&mut table, 4, &raw(&answered)));
    assert!(!progress(&mut table, 5, &raw(&answered)), "too late");
    assert!(!progress(&mut table, 6, &raw(&call(EPOCH - 1, 3))), "not open");
    assert_eq!(table.acks.held().0, 4, "none is let go");
    for (id, frames) in [(&running, vec![1, 2]), (&answered, vec![3])] {
        let Some(Rejoined::Waiting(place)) = table.rejoin(id) else { panic!("it is open") };
        assert_eq!(place.slot.close(), frames);
        table.leave(&place, true);
    }
    assert_eq!(is_answered(table.rejoin(&answered)), Some(true), "the answer stays until it is settled");
}

#[test]
fn r7_progress_that_nobody_comes_back_for_goes_with_its_call_or_its_child() {
    let mut table = table();
    let (settled, lost) = (call(EPOCH - 1, 1), call(EPOCH - 1, 2));
    assert!(progress(&mut table, 1, &raw(&settled)) && progress(&mut table, 2, &raw(&lost)));
    table.settle(settled.stream);
    assert_eq!(table.acks.held().0, 1);
    table.finish(End { exit: None, why: None });
    assert!(table.acks.is_settled());
}

#[test]
fn r4_what_can_not_be_kept_is_not_waited_for() {
    // An answer that was too large ends its call, whoever waits.
    let mut table = table();
    let id = call(EPOCH - 1, 1);
    let text = wire::id_text(&raw(&id)).into_owned();
    assert!(table.awaits(&text) && !table.awaits("6.3.\"c\""));
    table.place_lost(&Lost::AnswerTo(text.as_str().into()));
    assert!(!table.awaits(&text));
    assert_eq!(is_answered(table.rejoin(&id)), None);
    // So does one that names nobody, if it can be one call's only.
    let error = Bytes::from_static(br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"?"}}"#);
    assert!(!hear(&mut table, 1, error));
    assert_eq!(is_answered(table.rejoin(&call(EPOCH - 1, 2))), None);

    let mut table = self::table();
    let Some(Rejoined::Waiting(_place)) = table.rejoin(&id) else { panic!("it is open") };
    table.place_lost(&Lost::Unknown);
    assert!([1, 2].iter().all(|number| table.rejoin(&call(EPOCH - 1, *number)).is_none()));
}

#[test]
fn r4_too_many_untaken_answers_are_let_go_those_that_nobody_asked_for_first() {
    let mut table = table();
    assert!(!answer(&mut table, 1, &raw(&call(EPOCH, 1))));
    let half = HELD_FRAMES_MAX as u64 / 2;
    let mut frame = 1;
    for number in 1..=half * 2 {
        let id = call(EPOCH, number);
        let place = table.register(raw(&id), true).expect("it is new");
        frame += 1;
        assert!(answer(&mut table, frame, &raw(&id)));
        table.leave(&place, true);
        assert_eq!(table.relieve(), Relief::default());
    }
    assert!(answer(&mut table, frame + 1, &raw(&call(EPOCH - 1, 1))));
    let count = table.relieve().answers as u64;
    assert!(count > half / 2 && table.acks.held().0 <= HELD_FRAMES_MAX / 4 * 3);
    assert_eq!(table.rejoin(&call(EPOCH - 1, 1)).map(|_| ()), None);
    let gone = count - 1;
    assert_eq!(table.open.first_key_value().map(|(call, _)| call.number), Some(2));
    assert!(!table.open.contains_key(&call(EPOCH, gone).stream));
    assert!(table.open.contains_key(&call(EPOCH, gone + 1).stream));
}

#[test]
fn r7_c8_answers_left_behind_by_kills_never_cost_a_call_that_runs_its_progress() {
    let running = call(EPOCH - 1, 1_000_000);
    let junk = |number| call(EPOCH - 1, number);
    let many = HELD_FRAMES_MAX as u64 * 3;
    let open: Vec<_> = (1..=many).map(junk).chain([running.clone()]).map(|id| tag_of(id.stream)).collect();
    let mut table = Table::of(&open);
    let (mut frame, mut told) = (0, Vec::new());
    for number in 1..=many {
        frame += 1;
        assert!(answer(&mut table, frame, &raw(&junk(number))));
        assert_eq!(table.relieve().messages, 0);
        if number % 100 == 0 {
            frame += 1;
            told.push(frame);
            assert!(progress(&mut table, frame, &raw(&running)));
            assert_eq!(table.relieve().messages, 0);
        }
    }
    let Some(Rejoined::Waiting(place)) = table.rejoin(&running) else { panic!("it is open") };
    assert_eq!(place.slot.close(), told, "all of it, in order");
    assert_eq!(is_answered(table.rejoin(&junk(many))), Some(true), "the newest answers are there, too");
    assert_eq!(is_answered(table.rejoin(&junk(1))), None);
}

#[test]
fn r7_of_too_much_progress_the_older_goes_and_no_answer_that_a_client_may_wait_for() {
    let calls: Vec<_> = (1..=64).map(|number| call(EPOCH - 1, number)).collect();
    let mut table = Table::of(&calls.iter().map(|id| tag_of(id.stream)).collect::<Vec<_>>());
    let (mut frame, mut relief) = (0, Relief::default());
    for round in 0..HELD_FRAMES_MAX as u64 / 64 + 1 {
        for id in &calls[1..] {
            frame += 1;
            assert!(progress(&mut table, frame, &raw(id)));
            let now = table.relieve();
            relief.messages += now.messages;
            relief.answers += now.answers;
        }
        if round == 0 {
            frame += 1;
            assert!(answer(&mut table, frame, &raw(&calls[0])));
        }
    }
    assert!(relief.messages > 0 && relief.answers == 0, "{relief:?}");
    assert_eq!(is_answered(table.rejoin(&calls[0])), Some(true));
    for id in &calls[1..] {
        let Some(Rejoined::Waiting(place)) = table.rejoin(id) else { panic!("it is open") };
        assert!(!place.slot.close().is_empty(), "something of every call is there");
    }
}

#[test]
fn r6_answers_to_questions_of_earlier_workers_are_known_until_they_are_settled() {
    let asked = |epoch, number| StreamId { epoch, number };
    let tags = [(EPOCH - 2, 1), (EPOCH - 1, 2)].map(|(epoch, number)| answer_tag_of(asked(epoch, number)));
    let mut table = Table::of(&[&tags[..], &[tag_of(call(EPOCH - 1, 3).stream)]].concat());
    table.note_answer(asked(EPOCH, 4));
    assert_eq!(table.answers_before(EPOCH), [asked(EPOCH - 2, 1), asked(EPOCH - 1, 2)]);
    table.settle_answer(asked(EPOCH - 2, 1));
    assert_eq!(table.answers_before(EPOCH), [asked(EPOCH - 1, 2)]);
    assert_eq!(table.acks.flush().calls, [tags[0]]);
}
