//! What can become of a request, as one closed list: the word for programs, the HTTP status, the JSON-RPC number.

/// Why a request was not simply answered. Its [`name`](Self::name) stands in `error.data.mainstay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Code {
    /// The session id is not known, or is another principal's.
    SessionUnknown,
    /// A request that needs a session id came without one.
    SessionMissing,
    /// The session is being drained and takes no new calls.
    SessionDraining,
    /// The client ended the session.
    SessionDeleted,
    /// The session was idle for too long.
    SessionExpired,
    /// An operator, or a refused restore, ended the session.
    SessionClosed,
    /// The session is another principal's, and `terminal_status = "distinct"` says so.
    OtherPrincipal,
    /// The call may or may not have been executed; the gateway does not repeat it.
    OutcomeUnknown,
    /// The server could not be reached within its patience; the call was not sent.
    ServerUnreachable,
    /// The server refused the call before executing it.
    ServerRejected,
    /// The server wants credentials that the gateway does not have.
    AuthenticationNeeded,
    /// The server's process ended before it could answer.
    ChildExited,
    /// The server forgot its session twice in a row.
    UpstreamLostAgain,
    /// The answer was larger than a message may be.
    AnswerTooLarge,
    /// The request is not a JSON-RPC message, or not one that makes sense here.
    RequestInvalid,
    /// The request's body is larger than a message may be.
    BodyTooLarge,
    /// The request's head is larger than it may be.
    HeadTooLarge,
    /// A named limit is reached.
    LimitReached,
    /// The gateway cannot serve this now, and can again later.
    Unavailable,
    /// The protocol version of the request is not spoken here.
    VersionUnsupported,
    /// A batch in a protocol version that has none.
    BatchUnsupported,
    /// The `Origin` or `Host` header is not allowed.
    OriginRefused,
    /// No server of that name is configured.
    ServerUnknown,
    /// The HTTP method is not allowed here.
    MethodNotAllowed,
    /// The `Accept` header excludes what this endpoint answers.
    NotAcceptable,
    /// The body is not `application/json`.
    MediaTypeUnsupported,
    /// The `Last-Event-ID` is malformed or of another session.
    EventUnknown,
    /// The request proves nobody's identity, and this listener wants one.
    AuthenticationRequired,
    /// The client's name is missing or disagrees with its session.
    AgentRefused,
    /// The gateway failed in itself; the request changed nothing.
    Internal,
}

impl Code {
    /// Every code, for documentation and tests.
    pub const ALL: [Self; 30] = [
        Self::SessionUnknown,
        Self::SessionMissing,
        Self::SessionDraining,
        Self::SessionDeleted,
        Self::SessionExpired,
        Self::SessionClosed,
        Self::OtherPrincipal,
        Self::OutcomeUnknown,
        Self::ServerUnreachable,
        Self::ServerRejected,
        Self::AuthenticationNeeded,
        Self::ChildExited,
        Self::UpstreamLostAgain,
        Self::AnswerTooLarge,
        Self::RequestInvalid,
        Self::BodyTooLarge,
        Self::HeadTooLarge,
        Self::LimitReached,
        Self::Unavailable,
        Self::VersionUnsupported,
        Self::BatchUnsupported,
        Self::OriginRefused,
        Self::ServerUnknown,
        Self::MethodNotAllowed,
        Self::NotAcceptable,
        Self::MediaTypeUnsupported,
        Self::EventUnknown,
        Self::AuthenticationRequired,
        Self::AgentRefused,
        Self::Internal,
    ];

    /// The word for programs; the page in `docs/errors/` has the same name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SessionUnknown => "session_unknown",
            Self::SessionMissing => "session_missing",
            Self::SessionDraining => "session_draining",
            Self::SessionDeleted => "session_deleted",
            Self::SessionExpired => "session_expired",
            Self::SessionClosed => "session_closed",
            Self::OtherPrincipal => "other_principal",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::ServerUnreachable => "server_unreachable",
            Self::ServerRejected => "server_rejected",
            Self::AuthenticationNeeded => "authentication_needed",
            Self::ChildExited => "child_exited",
            Self::UpstreamLostAgain => "upstream_lost_again",
            Self::AnswerTooLarge => "answer_too_large",
            Self::RequestInvalid => "request_invalid",
            Self::BodyTooLarge => "body_too_large",
            Self::HeadTooLarge => "head_too_large",
            Self::LimitReached => "limit_reached",
            Self::Unavailable => "unavailable",
            Self::VersionUnsupported => "version_unsupported",
            Self::BatchUnsupported => "batch_unsupported",
            Self::OriginRefused => "origin_refused",
            Self::ServerUnknown => "server_unknown",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::NotAcceptable => "not_acceptable",
            Self::MediaTypeUnsupported => "media_type_unsupported",
            Self::EventUnknown => "event_unknown",
            Self::AuthenticationRequired => "authentication_required",
            Self::AgentRefused => "agent_refused",
            Self::Internal => "internal",
        }
    }

    /// The HTTP status of an answer that is refused for this reason before any call began.
    ///
    /// What becomes of a call that did begin is told inside HTTP 200, since clients drop their session at other
    /// statuses (S13a, U8); those codes are 200 here.
    pub const fn http_status(self, terminal: TerminalStatus) -> u16 {
        match (self, terminal) {
            (Self::SessionDraining, TerminalStatus::Distinct) => 409,
            (Self::SessionDeleted | Self::SessionExpired | Self::SessionClosed, TerminalStatus::Distinct) => 410,
            (
                Self::SessionUnknown
                | Self::SessionDraining
                | Self::SessionDeleted
                | Self::SessionExpired
                | Self::SessionClosed,
                TerminalStatus::Spec | TerminalStatus::Distinct,
            ) => 404,
            (Self::OtherPrincipal, TerminalStatus::Spec) => 404,
            (Self::OtherPrincipal, TerminalStatus::Distinct) => 403,
            (
                Self::OutcomeUnknown
                | Self::ServerUnreachable
                | Self::ServerRejected
                | Self::AuthenticationNeeded
                | Self::ChildExited
                | Self::UpstreamLostAgain
                | Self::AnswerTooLarge,
                _,
            ) => 200,
            (
                Self::SessionMissing
                | Self::RequestInvalid
                | Self::VersionUnsupported
                | Self::BatchUnsupported
                | Self::EventUnknown
                | Self::AgentRefused
                // Not 404, which tells a client that its session is gone: a server may come back (S13a).
                | Self::ServerUnknown,
                _,
            ) => 400,
            (Self::AuthenticationRequired, _) => 401,
            (Self::BodyTooLarge, _) => 413,
            (Self::HeadTooLarge, _) => 431,
            (Self::LimitReached, _) => 429,
            (Self::Unavailable, _) => 503,
            (Self::OriginRefused, _) => 403,
            (Self::MethodNotAllowed, _) => 405,
            (Self::NotAcceptable, _) => 406,
            (Self::MediaTypeUnsupported, _) => 415,
            (Self::Internal, _) => 500,
        }
    }

    /// The number in the JSON-RPC error object (JSON-RPC 2.0, section 5.1; MCP servers use -32001 for lost sessions).
    pub const fn json_rpc(self) -> i64 {
        match self {
            Self::SessionUnknown
            | Self::SessionDraining
            | Self::SessionDeleted
            | Self::SessionExpired
            | Self::SessionClosed
            | Self::OtherPrincipal => -32001,
            Self::RequestInvalid | Self::BatchUnsupported => -32600,
            Self::Internal => -32603,
            Self::SessionMissing
            | Self::OutcomeUnknown
            | Self::ServerUnreachable
            | Self::ServerRejected
            | Self::AuthenticationNeeded
            | Self::ChildExited
            | Self::UpstreamLostAgain
            | Self::AnswerTooLarge
            | Self::BodyTooLarge
            | Self::HeadTooLarge
            | Self::LimitReached
            | Self::Unavailable
            | Self::VersionUnsupported
            | Self::OriginRefused
            | Self::ServerUnknown
            | Self::MethodNotAllowed
            | Self::NotAcceptable
            | Self::MediaTypeUnsupported
            | Self::EventUnknown
            | Self::AuthenticationRequired
            | Self::AgentRefused => -32000,
        }
    }
}

/// How the status tells about ids that are not live (`terminal_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TerminalStatus {
    /// 404 for all of them, as the specification says.
    #[default]
    Spec,
    /// 409 while draining, 410 once ended, 403 for another principal's.
    Distinct,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s4_in_spec_mode_no_status_tells_an_id_that_is_not_ones_own_from_an_unknown_one() {
        for code in [Code::SessionUnknown, Code::OtherPrincipal, Code::SessionDeleted, Code::SessionDraining] {
            assert_eq!(code.http_status(TerminalStatus::Spec), 404, "{code:?}");
        }
        for (code, status) in [
            (Code::SessionUnknown, 404),
            (Code::SessionDraining, 409),
            (Code::SessionExpired, 410),
            (Code::OtherPrincipal, 403),
        ] {
            assert_eq!(code.http_status(TerminalStatus::Distinct), status, "{code:?}");
        }
    }

    #[test]
    fn s13a_401_has_its_one_meaning_and_names_are_unique() {
        let mut names: Vec<_> = Code::ALL.iter().map(|code| code.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
        let unauthorized = |code: &&Code| code.http_status(TerminalStatus::Spec) == 401;
        assert_eq!(Code::ALL.iter().filter(unauthorized).collect::<Vec<_>>(), [&Code::AuthenticationRequired]);
    }
}
