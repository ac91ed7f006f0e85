//! From the domain back to the file's form, and on to the upstream's.

use std::collections::BTreeMap;
use std::sync::Arc;

use mainstay_core::id::ServerName;
use mainstay_core::wire::modern::Era;
use mainstay_upstream::{TemplateError, Transport};

use super::file::{self, AdminTable, AuthTable, File, LimitsTable, Listen, ServeTable, ServerTable, SessionTable};
use super::period::Period;
use super::tokens::TokenValues;
use super::{
    Auth, AuthMode, Config, Limits, ListenStream, Offer, Reach, Server, Session, Sharing, StoreKind, Template,
    TerminalStatus,
};

/// The file that says the same as `config`, with every key set.
pub(super) fn file(config: &Config) -> File {
    File {
        listen: Some(Listen(config.listen)),
        state_dir: Some(config.state_dir.clone()),
        store: Some(match config.store {
            StoreKind::Sqlite => "sqlite".into(),
            StoreKind::Memory => "memory".into(),
        }),
        watch: Some(config.watch),
        admin: AdminTable { listen: Some(Listen(config.admin.listen)), token_file: config.admin.token_file.clone() },
        session: session(&config.session),
        limits: limits(&config.limits),
        auth: auth(&config.auth),
        serve: ServeTable {
            allowed_origins: Some(config.serve.allowed_origins.clone()),
            allowed_hosts: Some(config.serve.allowed_hosts.clone()),
        },
        servers: config.servers.iter().map(|(name, server)| (name.to_string(), table(server))).collect(),
    }
}

fn session(session: &Session) -> SessionTable {
    SessionTable {
        idle_expiry: Some(session.idle_expiry.into()),
        suspend_after: Some(session.suspend_after.into()),
        answer_json_within: Some(Period::Of(session.answer_json_within)),
        drain_grace: Some(Period::Of(session.drain_grace)),
        tombstone_retention: Some(session.tombstone_retention.into()),
        terminal_status: Some(match session.terminal_status {
            TerminalStatus::Spec => file::TerminalStatus::Spec,
            TerminalStatus::Distinct => file::TerminalStatus::Distinct,
        }),
        max_per_principal: Some(session.max_per_principal),
        calls_in_flight_max: Some(session.calls_in_flight_max),
        streams_max: Some(session.streams_max),
    }
}

fn limits(limits: &Limits) -> LimitsTable {
    LimitsTable {
        body_bytes_max: Some(limits.body_bytes_max),
        header_bytes_max: Some(limits.header_bytes_max),
        sessions_max: Some(limits.sessions_max),
        initialize_per_minute: Some(limits.initialize_per_minute),
        stateless_requests_per_principal: Some(limits.stateless_requests_per_principal),
        listens_per_principal: Some(limits.listens_per_principal),
    }
}

fn auth(auth: &Auth) -> AuthTable {
    let revealed = |values: &Vec<Template>| TokenValues(values.iter().map(|value| value.reveal().to_owned()).collect());
    AuthTable {
        mode: Some(match auth.mode {
            AuthMode::None => file::AuthMode::None,
            AuthMode::Token => file::AuthMode::Token,
        }),
        require_agent: Some(auth.require_agent),
        tokens: auth.tokens.iter().map(|(name, values)| (name.to_string(), revealed(values))).collect(),
    }
}

fn table(server: &Server) -> ServerTable {
    let mut table = ServerTable {
        patience: Some(Period::Of(server.patience)),
        safe_tools: server.safe_tools.clone(),
        suspend_after: server.suspend_after.map(Period::from),
        listen_stream: Some(match server.listen_stream {
            ListenStream::Auto => file::ListenStream::Auto,
            ListenStream::Always => file::ListenStream::Always,
            ListenStream::Never => file::ListenStream::Never,
        }),
        offer: Some(match server.offer {
            Offer::Auto => file::Offer::Auto,
            Offer::Legacy => file::Offer::Legacy,
            Offer::Both => file::Offer::Both,
        }),
        era: Some(match server.era {
            None => file::Era::Auto,
            Some(Era::Legacy) => file::Era::Legacy,
            Some(Era::Modern) => file::Era::Modern,
        }),
        ..ServerTable::default()
    };
    match &server.reach {
        Reach::Child { command, args, env, cwd, sharing: Sharing::Session, stateful } => {
            table.command = Some(command.clone());
            table.args = args.clone();
            table.env = revealed(env);
            table.cwd = cwd.clone();
            table.sharing = Some(file::Sharing::Session);
            table.stateful = Some(*stateful);
        }
        Reach::Http { url, transport, headers } => {
            table.url = Some(url.to_string());
            table.transport = Some(match transport {
                Transport::Auto => file::Transport::Auto,
                Transport::Streamable => file::Transport::Streamable,
                Transport::Sse => file::Transport::Sse,
            });
            table.headers = revealed(headers);
        }
    }
    table
}

fn revealed(templates: &BTreeMap<String, Template>) -> BTreeMap<String, String> {
    templates.iter().map(|(key, template)| (key.clone(), template.reveal().to_owned())).collect()
}

impl Config {
    /// The servers as the upstream side knows them.
    ///
    /// # Errors
    /// A template that is malformed, which the check of the configuration has ruled out.
    pub fn upstream_servers(&self) -> Result<Vec<Arc<mainstay_upstream::Server>>, TemplateError> {
        let server = |(name, server): (&ServerName, &Server)| {
            let upstream = upstream(name, server)?;
            Ok(Arc::new(mainstay_upstream::Server { calls_grace: self.session.drain_grace, ..upstream }))
        };
        self.servers.iter().map(server).collect()
    }
}

fn upstream(name: &ServerName, server: &Server) -> Result<mainstay_upstream::Server, TemplateError> {
    let reach = match &server.reach {
        Reach::Http { url, transport, headers } => {
            let header = |(header, template): (&String, &Template)| {
                let header = header.parse().expect("header names are checked with the configuration");
                Ok((header, mainstay_upstream::Template::parse(template.reveal())?))
            };
            mainstay_upstream::Reach::Http {
                url: url.clone(),
                transport: *transport,
                headers: headers.iter().map(header).collect::<Result<_, TemplateError>>()?,
            }
        }
        Reach::Child { command, args, env, cwd, sharing: Sharing::Session, stateful: _ } => {
            let variable = |(variable, template): (&String, &Template)| {
                Ok((variable.clone(), mainstay_upstream::Template::parse(template.reveal())?))
            };
            mainstay_upstream::Reach::Child {
                program: command.into(),
                args: args.iter().map(Into::into).collect(),
                env: env.iter().map(variable).collect::<Result<_, TemplateError>>()?,
                cwd: cwd.clone(),
            }
        }
    };
    Ok(mainstay_upstream::Server {
        patience: server.patience,
        era: server.era,
        safe_tools: server.safe_tools.iter().map(|tool| tool.as_str().into()).collect(),
        ..mainstay_upstream::Server::new(name.clone(), reach)
    })
}
