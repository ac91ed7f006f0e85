//! The bounds on what clients may take (S12), each under the name of its setting.

/// A setting that bounds what clients may take. Past it a request is refused, the setting is named, and nobody else is
/// evicted for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Live sessions in all.
    Sessions,
    /// Live sessions of one principal.
    SessionsOfPrincipal,
    /// Sessions that one peer opens within a minute.
    Openings,
    /// Calls in flight of one session.
    CallsInFlight,
    /// Streams kept for one session.
    Streams,
    /// Requests without a session that one principal has in flight.
    StatelessRequests,
    /// Streams that one principal listens to without a session.
    Listens,
    /// The body of a request.
    Body,
    /// The head of a request.
    Head,
}

impl Limit {
    /// Every limit, in the order of their declaration.
    pub const ALL: [Self; 9] = [
        Self::Sessions,
        Self::SessionsOfPrincipal,
        Self::Openings,
        Self::CallsInFlight,
        Self::Streams,
        Self::StatelessRequests,
        Self::Listens,
        Self::Body,
        Self::Head,
    ];

    /// The dotted name of the setting; it stands in `error.data.limit` and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sessions => "limits.sessions_max",
            Self::SessionsOfPrincipal => "session.max_per_principal",
            Self::Openings => "limits.initialize_per_minute",
            Self::CallsInFlight => "session.calls_in_flight_max",
            Self::Streams => "session.streams_max",
            Self::StatelessRequests => "limits.stateless_requests_per_principal",
            Self::Listens => "limits.listens_per_principal",
            Self::Body => "limits.body_bytes_max",
            Self::Head => "limits.header_bytes_max",
        }
    }
}
