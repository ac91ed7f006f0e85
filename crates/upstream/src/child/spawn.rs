//! Starting a child: its environment, and what it means if it can't be started.

use std::ffi::OsString;

use mainstay_core::id::SessionKey;
use mainstay_keeper::client::SpawnError;
use mainstay_keeper::{Spawn, SpawnFailure};

use super::label::Label;
use crate::failure::{Blame, Failure};
use crate::server::{Reach, Server};
use crate::template::Environment;
use crate::upstreams::{Destination, Parts, unusable};

/// The variables that a child gets of the gateway's own, if they are set (C7): where programs and their files are, whose
/// they are, and how to speak to people. Anything else is given in the configuration.
pub const ALLOWED_VARIABLES: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_COLLATE",
    "LC_CTYPE",
    "LC_MESSAGES",
    "LC_MONETARY",
    "LC_NUMERIC",
    "LC_TIME",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_DIRS",
    "XDG_CONFIG_HOME",
    "XDG_DATA_DIRS",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
];

/// What the keeper is to start for `session`.
pub(super) fn request(parts: &Parts, destination: &Destination, session: SessionKey) -> Result<Spawn, Failure> {
    let server = &*destination.server;
    let Reach::Child { program, args, env: _, cwd } = &server.reach else {
        return Err(unusable(server, &"it has no command"));
    };
    let label = Label { definition: server.definition(), session, server: server.name.clone() };
    Ok(Spawn {
        label: label.encode(),
        name: server.name.as_str().to_owned(),
        program: program.clone(),
        args: args.clone(),
        env: environment(server, &*parts.environment)?,
        cwd: cwd.clone(),
        marker: marker((parts.entropy)()),
    })
}

fn environment(server: &Server, environment: &dyn Environment) -> Result<Vec<(OsString, OsString)>, Failure> {
    let configured = match &server.reach {
        Reach::Child { env, .. } => env.as_slice(),
        Reach::Http { .. } => &[],
    };
    let is_configured = |name: &str| configured.iter().any(|(own, _)| own == name);
    let inherited = ALLOWED_VARIABLES.iter().filter(|name| !is_configured(name));
    let mut variables: Vec<(OsString, OsString)> =
        inherited.filter_map(|name| Some(((*name).into(), environment.var(name)?.into()))).collect();
    for (name, template) in configured {
        let value = template.resolve(environment).map_err(|error| unusable(server, &error))?;
        variables.push((name.into(), value.reveal().into()));
    }
    Ok(variables)
}

fn marker(entropy: [u8; 16]) -> String {
    entropy.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What it means that the keeper did not start a child.
pub(super) fn failure(server: &Server, error: &SpawnError) -> Failure {
    match error {
        SpawnError::Failed {
            failure:
                SpawnFailure::ProgramNotFound
                | SpawnFailure::CwdMissing
                | SpawnFailure::NotPermitted
                | SpawnFailure::Invalid,
            ..
        } => unusable(server, error),
        SpawnError::Failed { failure: SpawnFailure::TooMany | SpawnFailure::Keeper, .. } => {
            Failure::Gateway { server: server.name.clone(), problem: error.to_string().into() }
        }
        SpawnError::Failed { failure: SpawnFailure::System, .. } | SpawnError::Detached => {
            server.unreachable(error.to_string().into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use mainstay_core::id::ServerName;

    use super::*;
    use crate::template::Template;

    struct Table;

    impl Environment for Table {
        fn var(&self, name: &str) -> Option<String> {
            matches!(name, "PATH" | "HOME" | "MAINSTAY_SECRET" | "TOKEN").then(|| format!("<{name}>"))
        }

        fn file(&self, _: &Path) -> io::Result<String> {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    fn server(env: &[(&str, &str)]) -> Server {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), Template::parse(value).expect("well formed")));
        let reach = Reach::Child { program: "srv".into(), args: Vec::new(), env: env.collect(), cwd: None };
        Server::new(ServerName::parse("srv").expect("a name"), reach)
    }

    #[test]
    fn c7_a_child_gets_what_is_configured_and_the_allow_list_only() {
        let variables = environment(&server(&[("HOME", "/srv"), ("KEY", "x-${TOKEN}")]), &Table).expect("all are set");
        let shown: Vec<String> =
            variables.iter().map(|(name, value)| format!("{}={}", name.display(), value.display())).collect();
        assert_eq!(shown, ["PATH=<PATH>", "HOME=/srv", "KEY=x-<TOKEN>"]);
        let unset = environment(&server(&[("KEY", "${ABSENT}")]), &Table);
        assert!(matches!(unset, Err(Failure::Configuration { problem, .. }) if problem.contains("ABSENT")));
    }

    #[test]
    fn what_the_gateway_can_not_do_is_no_fault_of_the_server() {
        let of = |failure| SpawnError::Failed { failure, detail: "could not write its record: no space".to_owned() };
        for own in [SpawnFailure::Keeper, SpawnFailure::TooMany] {
            let failure = failure(&server(&[]), &of(own));
            assert!(matches!(failure, Failure::Gateway { .. }), "{failure}");
            assert_eq!(failure.outcome(), crate::failure::Outcome::NotDispatched);
            assert!(failure.to_string().starts_with("the gateway can't start server `srv` for now: "), "{failure}");
        }
        assert!(failure(&server(&[]), &of(SpawnFailure::System)).is_unreachable());
    }
}
