//! Golden bytes, round trips, and what is not a body.

use proptest::prelude::*;

use super::*;

fn session() -> SessionRecord {
    SessionRecord {
        key: SessionKey::from_bytes([0xa1; 32]),
        server: ServerName::parse("files").expect("a name"),
        principal: Principal::Subject { issuer: "https://issuer".into(), subject: "alice".into() },
        state: State::Ready,
        generation: 3,
        epoch: Epoch { counter: 2, nonce: 0x0102_0304_0506_0708 },
        opened_at: Timestamp::from_unix_millis(1_000),
        seen_at: Timestamp::from_unix_millis(2_000),
        deadline: Timestamp::from_unix_millis(3_000),
        version: Version::V2025_11_25,
        client: ClientName { name: "client".into(), version: "1.0".into() },
        agent: Some("scout".into()),
        initialize_params: Bytes::from_static(b"{\"capabilities\":{}}"),
        confirmed: true,
        contract: Contract::from_bytes([0xc0; 32]),
    }
}

fn stone() -> Tombstone {
    Tombstone {
        key: SessionKey::from_bytes([0xa1; 32]),
        server: ServerName::parse("files").expect("a name"),
        principal: Principal::Token("alice".into()),
        client: ClientName { name: "client".into(), version: "1.0".into() },
        agent: None,
        state: State::Expired,
        reason: "idle".into(),
        opened_at: Timestamp::from_unix_millis(1_000),
        ended_at: Timestamp::from_unix_millis(2_000),
        keep_until: Timestamp::from_unix_millis(3_000),
        version: Version::V2025_06_18,
        generation: 4,
        epoch: Epoch { counter: 2, nonce: 1 },
    }
}

fn resume() -> ResumeRecord {
    ResumeRecord {
        key: SessionKey::from_bytes([0xa1; 32]),
        server: ServerName::parse("tickets").expect("a name"),
        url: "https://x/mcp".into(),
        fingerprint: [0xf1; 32],
        upstream_id: UpstreamId::parse("up-1"),
        version: "2025-11-25".into(),
        initialize_result: Bytes::from_static(b"{}"),
        log_level: Some("debug".into()),
        subscriptions: BTreeSet::from(["a:1".into(), "b:2".into()]),
        told: true,
        last_event_id: None,
        saved_at: Timestamp::from_unix_millis(1),
        used_at: Timestamp::from_unix_millis(2),
        continuity: Continuity::Remade,
        remade_count: 5,
        remade_reason: Some("404".into()),
    }
}

fn owed() -> OwedDelete {
    OwedDelete {
        id: 9,
        session: Some(SessionKey::from_bytes([0xa1; 32])),
        server: ServerName::parse("tickets").expect("a name"),
        url: "https://x/mcp".into(),
        upstream_id: UpstreamId::parse("up-1").expect("an id"),
        version: "2025-11-25".into(),
        owed_at: Timestamp::from_unix_millis(1),
        attempts: 2,
        next_at: Timestamp::from_unix_millis(3),
        last_error: Some("down".into()),
    }
}

fn card() -> ServerCard {
    ServerCard {
        server: ServerName::parse("tickets").expect("a name"),
        fingerprint: [0xf1; 32],
        initialize_result: Bytes::from_static(b"{}"),
        spoken: Spoken { legacy: Some(false), modern: Some(true) },
        saved_at: Timestamp::from_unix_millis(1),
    }
}

fn entry() -> AuditEntry {
    AuditEntry {
        at: Timestamp::from_unix_millis(1),
        actor: Actor::Client(Principal::Token("alice".into())),
        action: Action::Closed,
        session: Some(SessionKey::from_bytes([0xa1; 32])),
        server: Some(ServerName::parse("files").expect("a name")),
        detail: "because".into(),
    }
}

/// Bytes as text: printable ones as they are, runs of equal ones with their number, others in hexadecimal.
fn shown(bytes: &[u8]) -> String {
    let mut text = String::new();
    for run in bytes.chunk_by(|a, b| a == b) {
        match (run[0], run.len()) {
            (byte @ b'!'..=b'~', length) => text.extend(std::iter::repeat_n(char::from(byte), length)),
            (byte, length @ 4..) => text += &format!("<{byte:02x}*{length}>"),
            (byte, length) => (0..length).for_each(|_| text += &format!("<{byte:02x}>")),
        }
    }
    text
}

#[test]
fn the_layout_of_each_version_is_frozen() {
    let golden = [
        (
            encode_session(&session()),
            "<01><01><a1*32><00><00><00><05>files<03><00><00><00><0e>https://issuer<00><00><00><05>al\
             ice<01><00*7><03><00*7><02><01><02><03><04><05><06><07><08><00*6><03><e8><00*6><07><d0>\
             <00*6><0b><b8><00><00><00><0a>2025-11-25<00><00><00><06>client<00><00><00><03>1.0<01>\
             <00><00><00><05>scout<00><00><00><13>{\"capabilities\":{}}<01><c0*32>",
        ),
        (
            encode_tombstone(&stone()),
            "<02><02><a1*32><00><00><00><05>files<02><00><00><00><05>alice<00><04><00><00><00><04>idle\
             <00*6><03><e8><00*6><07><d0><00*6><0b><b8><00><00><00><0a>2025-06-18<00*7><04><00*7><02>\
             <00*7><01><00><00><00><06>client<00><00><00><03>1.0",
        ),
        (
            encode_resume(&resume()),
            "<03><02><a1*32><00><00><00><07>tickets<00><00><00><0d>https://x/mcp<f1*32><01><00><00>\
             <00><04>up-1<00><00><00><0a>2025-11-25<00><00><00><02>{}<01><00><00><00><05>debug<00>\
             <00><00><02><00><00><00><03>a:1<00><00><00><03>b:2<01><00*8><01><00*7><02><02><00><00><00>\
             <05><01><00><00><00><03>404",
        ),
        (
            encode_owed(&owed()),
            "<04><02><00><00><00><07>tickets<00><00><00><0d>https://x/mcp<00><00><00><04>up-1<00><00>\
             <00><0a>2025-11-25<00*7><01><00><00><00><02><00*7><03><01><a1*32><01><00><00><00><04>down",
        ),
        (encode_card(&card()), "<05><02><00><00><00><07>tickets<f1*32><00><00><00><02>{}<00*7><01><01><02>"),
        (
            encode_audit(&entry()),
            "<06><01><00*7><01><00><02><00><00><00><05>alice<06><01><a1*32><01><00><00><00><05>files<00><00><00><07>because",
        ),
    ];
    for (body, expected) in golden {
        assert_eq!(shown(&body), expected);
    }
}

/// The first version of a resume record has all but `told`.
#[test]
fn u1_a_resume_record_of_version_1_is_read_as_one_whose_server_was_not_told() {
    let mut body = encode_resume(&resume());
    let told = body.windows(4).position(|window| window == b"b:2\x01").expect("it is there") + 3;
    body.remove(told);
    body[1] = 1;
    assert_eq!(decode_resume(&body), Ok(ResumeRecord { told: false, ..resume() }));
}

/// The first version of a tombstone ends before `client`.
#[test]
fn o1_a_tombstone_of_version_1_is_read_as_one_of_a_client_without_a_name() {
    let early = Tombstone { client: ClientName::default(), ..stone() };
    let mut body = encode_tombstone(&early);
    body.truncate(body.len() - 8);
    body[1] = 1;
    let golden = "<02><01><a1*32><00><00><00><05>files<02><00><00><00><05>alice<00><04><00><00><00><04>idle\
        <00*6><03><e8><00*6><07><d0><00*6><0b><b8><00><00><00><0a>2025-06-18<00*7><04><00*7><02><00*7><01>";
    assert_eq!(shown(&body), golden);
    assert_eq!(decode_tombstone(&body), Ok(early));
}

/// The first version of an owed delete ends before `session`.
#[test]
fn e5_a_card_of_version_1_is_read_as_one_of_a_server_whose_eras_are_not_known() {
    let early = ServerCard { spoken: Spoken::default(), ..card() };
    let golden = "<05><01><00><00><00><07>tickets<f1*32><00><00><00><02>{}<00*7><01>";
    assert_eq!(shown(&card_of_version_1(&card())), golden);
    assert_eq!(decode_card(&card_of_version_1(&card())), Ok(early));
}

#[test]
fn u7_an_owed_delete_of_version_1_is_read_as_one_of_no_known_session() {
    let early = OwedDelete { session: None, last_error: None, ..owed() };
    let golden = "<04><01><00><00><00><07>tickets<00><00><00><0d>https://x/mcp<00><00><00><04>up-1<00><00>\
        <00><0a>2025-11-25<00*7><01><00><00><00><02><00*7><03>";
    assert_eq!(shown(&owed_of_version_1(&early)), golden);
    assert_eq!(decode_owed(9, &owed_of_version_1(&early)), Ok(early));
}

#[test]
fn every_body_reads_back() {
    assert_eq!(decode_session(&encode_session(&session())), Ok(session()));
    assert_eq!(decode_tombstone(&encode_tombstone(&stone())), Ok(stone()));
    assert_eq!(decode_resume(&encode_resume(&resume())), Ok(resume()));
    assert_eq!(decode_owed(9, &encode_owed(&owed())), Ok(owed()));
    assert_eq!(decode_card(&encode_card(&card())), Ok(card()));
    assert_eq!(decode_audit(&encode_audit(&entry())), Ok(entry()));
}

/// How each kind of body is refused, if it is.
fn refusals(body: &[u8]) -> [Option<Malformed>; 6] {
    [
        decode_session(body).err(),
        decode_tombstone(body).err(),
        decode_resume(body).err(),
        decode_owed(9, body).err(),
        decode_card(body).err(),
        decode_audit(body).err(),
    ]
}

fn bodies() -> [Vec<u8>; 6] {
    [
        encode_session(&session()),
        encode_tombstone(&stone()),
        encode_resume(&resume()),
        encode_owed(&owed()),
        encode_card(&card()),
        encode_audit(&entry()),
    ]
}

#[test]
fn a_body_is_read_whole_and_as_what_it_is() {
    for (kind, body) in bodies().into_iter().enumerate() {
        for length in 0..body.len() {
            assert_eq!(refusals(&body[..length]), [Some(Malformed::Damaged); 6], "cut to {length}");
        }
        let longer = [body.as_slice(), &[0]].concat();
        assert_eq!(refusals(&longer), [Some(Malformed::Damaged); 6]);
        let readers = refusals(&body).map(|refusal| refusal.is_none());
        assert_eq!(readers.iter().filter(|reads| **reads).count(), 1);
        assert!(readers[kind]);
    }
}

#[test]
fn a_later_version_is_told_from_damage() {
    for (kind, mut body) in bodies().into_iter().enumerate() {
        body[1] += 1;
        assert_eq!(refusals(&body)[kind], Some(Malformed::Future { version: body[1] }));
        body[1] = 0;
        assert_eq!(refusals(&body)[kind], Some(Malformed::Damaged));
    }
}

fn principal() -> impl Strategy<Value = Principal> {
    prop_oneof![
        Just(Principal::Anonymous),
        any::<String>().prop_map(|name| Principal::Agent(name.into())),
        any::<String>().prop_map(|name| Principal::Token(name.into())),
        any::<(String, String)>()
            .prop_map(|(issuer, subject)| Principal::Subject { issuer: issuer.into(), subject: subject.into() }),
    ]
}

proptest! {
    #[test]
    fn sessions_round_trip(
        key: [u8; 32],
        principal in principal(),
        numbers: [u64; 6],
        texts: (String, String),
        initialize_params: Vec<u8>,
        flags: (bool, bool),
        version in 0..Version::ALL.len(),
        contract: [u8; 32],
        agent: Option<String>,
    ) {
        let record = SessionRecord {
            key: SessionKey::from_bytes(key),
            principal,
            state: if flags.0 { State::Ready } else { State::Draining },
            generation: numbers[0],
            epoch: Epoch { counter: numbers[1], nonce: numbers[2] },
            opened_at: Timestamp::from_unix_millis(numbers[3]),
            seen_at: Timestamp::from_unix_millis(numbers[4]),
            deadline: Timestamp::from_unix_millis(numbers[5]),
            version: Version::ALL[version],
            client: ClientName::new(&texts.0, &texts.1),
            initialize_params: initialize_params.into(),
            confirmed: flags.1,
            contract: Contract::from_bytes(contract),
            agent: agent.map(Into::into),
            ..session()
        };
        prop_assert_eq!(decode_session(&encode_session(&record)), Ok(record));
    }

    #[test]
    fn tombstones_round_trip(
        principal in principal(),
        agent: Option<String>,
        reason: String,
        client: (String, String),
        ended in 3_u8..6,
    ) {
        let state = state_of(ended).expect("an ended one");
        let client = ClientName::new(&client.0, &client.1);
        let agent = agent.map(Into::into);
        let stone = Tombstone { principal, client, agent, reason: reason.into(), state, ..stone() };
        prop_assert_eq!(decode_tombstone(&encode_tombstone(&stone)), Ok(stone));
    }

    #[test]
    fn audit_entries_round_trip(
        principal in prop::option::of(principal()),
        operator: bool,
        action in 0..Action::ALL.len(),
        session: Option<[u8; 32]>,
        server: bool,
        detail: String,
    ) {
        let alone = if operator { Actor::Operator } else { Actor::Gateway };
        let entry = AuditEntry {
            actor: principal.map_or(alone, Actor::Client),
            action: Action::ALL[action],
            session: session.map(SessionKey::from_bytes),
            server: entry().server.filter(|_| server),
            detail: detail.into(),
            ..entry()
        };
        prop_assert_eq!(decode_audit(&encode_audit(&entry)), Ok(entry));
    }

    #[test]
    fn a_principal_is_read_back_from_how_it_is_displayed(principal in principal()) {
        let hashed = matches!(&principal, Principal::Subject { issuer, .. } if issuer.contains('#'));
        let read = crate::rows::principal_of(&principal.to_string());
        prop_assert!(hashed || read == Some(principal));
    }

    #[test]
    fn resume_records_round_trip(
        texts: (String, String, String),
        options: [Option<u16>; 3],
        subscriptions in prop::collection::btree_set(any::<String>(), 0..5),
        initialize_result: Vec<u8>,
        numbers: [u64; 2],
        remade_count: u32,
        told: bool,
    ) {
        let option = |index: usize| options[index].map(|number| number.to_string().into_boxed_str());
        let record = ResumeRecord {
            url: texts.0.into(),
            version: texts.1.into(),
            remade_reason: Some(texts.2.into()),
            upstream_id: option(0).and_then(|text| UpstreamId::parse(&text)),
            log_level: option(1),
            last_event_id: option(2),
            subscriptions: subscriptions.into_iter().map(Into::into).collect(),
            initialize_result: initialize_result.into(),
            saved_at: Timestamp::from_unix_millis(numbers[0]),
            used_at: Timestamp::from_unix_millis(numbers[1]),
            remade_count,
            told,
            ..resume()
        };
        prop_assert_eq!(decode_resume(&encode_resume(&record)), Ok(record));
    }

    #[test]
    fn reading_junk_never_panics_nor_allocates_what_it_claims(kind in 1_u8..7, version in 1_u8..3, junk: Vec<u8>) {
        let body = [&[kind, version], junk.as_slice()].concat();
        let _ = refusals(&body);
    }
}
