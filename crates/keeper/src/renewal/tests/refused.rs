//! Renewals that fail: the program before goes on.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::probe::Probe;

#[test]
fn t2_what_can_not_be_executed_changes_nothing() {
    let mut probe = Probe::start();
    let child = probe.spawn("cat");
    let (about, descriptors) = (probe.ask("about"), probe.ask("descriptors"));
    let text = probe.path("text");
    // By another process: what this one has open for writing is inherited by whatever another thread starts just then.
    let write = std::process::Command::new("sh").args(["-c", "echo no program > \"$0\""]).arg(&text).status();
    assert!(write.unwrap().success());
    let missing = format!("renew {}", probe.path("missing").display());
    assert_eq!(probe.ask(&missing), "could not execute the program: No such file or directory (os error 2)");
    let unexecutable = format!("renew {}", text.display());
    assert_eq!(probe.ask(&unexecutable), "could not execute the program: Permission denied (os error 13)");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).unwrap();
    for _ in 0..3 {
        assert_eq!(probe.ask(&unexecutable), "could not execute the program: Exec format error (os error 8)");
    }
    assert_eq!((probe.ask("about"), probe.ask("descriptors")), (about, descriptors));
    // A broken pipe is still an error and no end.
    let deaf = probe.spawn("exec <&-; sleep 0.1; echo deaf; sleep 1000");
    probe.hear(deaf, 1);
    probe.ask(&format!("write {} anything", deaf.id));
    assert!(probe.hear_exit(deaf).contains("frames_written: 0"));
    probe.ask(&format!("write {} still there", child.id));
    assert_eq!(probe.hear(child, 1), [b"still there"]);
    assert_eq!(probe.ask("count"), "0 None");
}

/// The next program fails in this way, and the one before goes on.
fn sent_back(fault: &str) -> String {
    let mut probe = Probe::start();
    let child = probe.spawn("printf half; read line; echo ' and half'; cat");
    probe.ask(&format!("call {} 5", child.id));
    probe.hear(child, 1);
    let about = probe.ask("about");
    fs::write(probe.path("fault"), fault).unwrap();
    probe.renew("renew");
    assert!(!probe.path("fault").exists(), "the next program was never there");
    assert_eq!(probe.ask("about"), about);
    assert!(probe.ask("children").starts_with(&format!("{} {} ", child.id, child.pid)));
    assert!(probe.ask("children").contains("[5]"));
    probe.ask(&format!("write {} still there", child.id));
    assert_eq!(probe.hear(child, 2), [&b"half and half"[..], b"still there"]);
    let reason = probe.ask("count");
    // The way is free for another try.
    probe.renew("renew");
    assert_eq!(probe.ask("count"), "2 None");
    reason
}

#[test]
fn t2_a_program_that_refuses_gives_everything_back() {
    assert_eq!(sent_back("refuse"), r#"1 Some("the new one says no")"#);
}

#[test]
fn t2_a_state_in_another_form_is_given_back() {
    assert_eq!(sent_back("format"), r#"1 Some("the state is written in form 2, this program knows form 1")"#);
}

#[test]
fn t2_a_state_that_is_cut_off_is_given_back() {
    assert_eq!(sent_back("state"), r#"1 Some("the state is unusable: the state is cut off")"#);
}
