//! The methods of MCP, as far as the gateway treats them differently, and the revisions of the legacy era.

use std::fmt;

/// A method of the protocol. What the gateway need not tell apart is [`Other`](Self::Other).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// `initialize`
    Initialize,
    /// `notifications/initialized`
    Initialized,
    /// `ping`
    Ping,
    /// `notifications/cancelled`
    Cancelled,
    /// `notifications/progress`
    Progress,
    /// `logging/setLevel`
    SetLevel,
    /// `resources/subscribe`
    Subscribe,
    /// `resources/unsubscribe`
    Unsubscribe,
    /// `tools/list`
    ToolsList,
    /// `tools/call`
    ToolsCall,
    /// `prompts/list`
    PromptsList,
    /// `prompts/get`
    PromptsGet,
    /// `resources/list`
    ResourcesList,
    /// `resources/templates/list`
    ResourceTemplatesList,
    /// `resources/read`
    ResourcesRead,
    /// `completion/complete`
    Complete,
    /// `server/discover`
    Discover,
    /// Any other: it may stream, and it may have effects.
    Other,
}

impl Method {
    /// The method of that name; names are compared as they are, case included.
    pub fn of(name: &str) -> Self {
        match name {
            "initialize" => Self::Initialize,
            "notifications/initialized" => Self::Initialized,
            "ping" => Self::Ping,
            "notifications/cancelled" => Self::Cancelled,
            "notifications/progress" => Self::Progress,
            "logging/setLevel" => Self::SetLevel,
            "resources/subscribe" => Self::Subscribe,
            "resources/unsubscribe" => Self::Unsubscribe,
            "tools/list" => Self::ToolsList,
            "tools/call" => Self::ToolsCall,
            "prompts/list" => Self::PromptsList,
            "prompts/get" => Self::PromptsGet,
            "resources/list" => Self::ResourcesList,
            "resources/templates/list" => Self::ResourceTemplatesList,
            "resources/read" => Self::ResourcesRead,
            "completion/complete" => Self::Complete,
            "server/discover" => Self::Discover,
            _ => Self::Other,
        }
    }

    /// The method's name; `other` for those that have no variant of their own.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Initialize => "initialize",
            Self::Initialized => "notifications/initialized",
            Self::Ping => "ping",
            Self::Cancelled => "notifications/cancelled",
            Self::Progress => "notifications/progress",
            Self::SetLevel => "logging/setLevel",
            Self::Subscribe => "resources/subscribe",
            Self::Unsubscribe => "resources/unsubscribe",
            Self::ToolsList => "tools/list",
            Self::ToolsCall => "tools/call",
            Self::PromptsList => "prompts/list",
            Self::PromptsGet => "prompts/get",
            Self::ResourcesList => "resources/list",
            Self::ResourceTemplatesList => "resources/templates/list",
            Self::ResourcesRead => "resources/read",
            Self::Complete => "completion/complete",
            Self::Discover => "server/discover",
            Self::Other => "other",
        }
    }

    /// Whether the answer is always plain JSON, never a primed stream (R1). Notifications have no answer at all.
    pub const fn answered_plain(self) -> bool {
        match self {
            Self::Initialize
            | Self::Initialized
            | Self::Ping
            | Self::Cancelled
            | Self::Progress
            | Self::SetLevel
            | Self::Subscribe
            | Self::Unsubscribe
            | Self::ToolsList
            | Self::PromptsList
            | Self::ResourcesList
            | Self::ResourceTemplatesList
            | Self::Discover => true,
            Self::ToolsCall | Self::PromptsGet | Self::ResourcesRead | Self::Complete | Self::Other => false,
        }
    }

    /// Whether a request may be sent again without asking, since being carried out twice changes nothing (U5).
    pub const fn is_safe(self) -> bool {
        match self {
            Self::Ping
            | Self::SetLevel
            | Self::Subscribe
            | Self::Unsubscribe
            | Self::ToolsList
            | Self::PromptsList
            | Self::PromptsGet
            | Self::ResourcesList
            | Self::ResourceTemplatesList
            | Self::ResourcesRead
            | Self::Complete
            | Self::Discover => true,
            Self::Initialize | Self::Initialized | Self::Cancelled | Self::Progress | Self::ToolsCall | Self::Other => {
                false
            }
        }
    }
}

/// A protocol revision of the legacy era, in which a session begins with `initialize`. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// 2024-11-05: HTTP+SSE and stdio.
    V2024_11_05,
    /// 2025-03-26: Streamable HTTP, batches.
    V2025_03_26,
    /// 2025-06-18: no batches, `MCP-Protocol-Version` header.
    V2025_06_18,
    /// 2025-11-25: priming events, tasks.
    V2025_11_25,
}

impl Version {
    /// Every revision, oldest first.
    pub const ALL: [Self; 4] = [Self::V2024_11_05, Self::V2025_03_26, Self::V2025_06_18, Self::V2025_11_25];

    /// The newest revision of the legacy era.
    pub const LATEST: Self = Self::V2025_11_25;

    /// The revision written as `text`, if it is one of the legacy era.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// The revision as `protocolVersion` and `MCP-Protocol-Version` write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V2024_11_05 => "2024-11-05",
            Self::V2025_03_26 => "2025-03-26",
            Self::V2025_06_18 => "2025-06-18",
            Self::V2025_11_25 => "2025-11-25",
        }
    }

    /// Whether a body may be an array of messages (2025-03-26, Overview, Batching). No other revision has it (S17).
    pub const fn allows_batches(self) -> bool {
        match self {
            Self::V2025_03_26 => true,
            Self::V2024_11_05 | Self::V2025_06_18 | Self::V2025_11_25 => false,
        }
    }

    /// Whether a client must send `MCP-Protocol-Version` after `initialize` (2025-06-18, Transports, Protocol
    /// Version Header).
    pub const fn requires_header(self) -> bool {
        match self {
            Self::V2024_11_05 | Self::V2025_03_26 => false,
            Self::V2025_06_18 | Self::V2025_11_25 => true,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r1_u5_what_is_known_of_each_method() {
        for (name, method, plain, safe) in [
            ("initialize", Method::Initialize, true, false),
            ("notifications/initialized", Method::Initialized, true, false),
            ("ping", Method::Ping, true, true),
            ("notifications/cancelled", Method::Cancelled, true, false),
            ("notifications/progress", Method::Progress, true, false),
            ("logging/setLevel", Method::SetLevel, true, true),
            ("resources/subscribe", Method::Subscribe, true, true),
            ("resources/unsubscribe", Method::Unsubscribe, true, true),
            ("tools/list", Method::ToolsList, true, true),
            ("tools/call", Method::ToolsCall, false, false),
            ("prompts/list", Method::PromptsList, true, true),
            ("prompts/get", Method::PromptsGet, false, true),
            ("resources/list", Method::ResourcesList, true, true),
            ("resources/templates/list", Method::ResourceTemplatesList, true, true),
            ("resources/read", Method::ResourcesRead, false, true),
            ("completion/complete", Method::Complete, false, true),
            ("server/discover", Method::Discover, true, true),
            ("tasks/result", Method::Other, false, false),
            ("Ping", Method::Other, false, false),
            ("", Method::Other, false, false),
        ] {
            let known = Method::of(name);
            assert_eq!((known, known.answered_plain(), known.is_safe()), (method, plain, safe), "{name:?}");
        }
    }

    #[test]
    fn s17_revisions_read_back_in_order() {
        assert!(Version::ALL.is_sorted());
        assert_eq!(Version::ALL.last(), Some(&Version::LATEST));
        for version in Version::ALL {
            assert_eq!(Version::parse(version.as_str()), Some(version));
        }
        for unknown in ["", "2026-07-28", "2025-11-25 ", "2025-3-26"] {
            assert_eq!(Version::parse(unknown), None, "{unknown:?}");
        }
    }

    #[test]
    fn s17_what_each_revision_knows() {
        let batches: Vec<_> = Version::ALL.map(Version::allows_batches).into();
        assert_eq!(batches, [false, true, false, false]);
        let header: Vec<_> = Version::ALL.map(Version::requires_header).into();
        assert_eq!(header, [false, false, true, true]);
    }
}
