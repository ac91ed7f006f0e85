//! Command lines of the scriptable servers.

use std::collections::BTreeMap;

/// A command line of switches (`--ignore-term`) and values (`--port 0`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    values: BTreeMap<String, String>,
}

impl Flags {
    /// Reads arguments. `switches` take no value, `valued` take one; anything else is an error.
    ///
    /// # Errors
    /// A sentence that names the argument.
    pub fn read(args: impl IntoIterator<Item = String>, switches: &[&str], valued: &[&str]) -> Result<Flags, String> {
        let mut flags = Flags::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let name = arg.strip_prefix("--").unwrap_or_default();
            if switches.contains(&name) {
                flags.values.insert(name.to_owned(), String::new());
            } else if valued.contains(&name) {
                let value = args.next().ok_or_else(|| format!("`{arg}` takes a value"))?;
                flags.values.insert(name.to_owned(), value);
            } else {
                return Err(format!("unknown argument `{arg}`"));
            }
        }
        Ok(flags)
    }

    /// Whether a switch was given.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// A value that was given.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    /// A number that was given.
    ///
    /// # Errors
    /// If it was given and is no such number.
    pub fn number<N: std::str::FromStr>(&self, name: &str) -> Result<Option<N>, String> {
        self.value(name)
            .map(|value| value.parse().map_err(|_| format!("`--{name} {value}`: not a number in range")))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::Flags;

    fn read(line: &str) -> Result<Flags, String> {
        Flags::read(line.split_whitespace().map(str::to_owned), &["noise"], &["port"])
    }

    #[test]
    fn switches_values_and_mistakes() {
        let flags = read("--noise --port 7").expect("well formed");
        assert!(flags.has("noise"));
        assert_eq!(flags.number::<u16>("port"), Ok(Some(7)));
        assert!(read("--port").is_err());
        assert!(read("--prot 7").is_err());
        assert!(read("--port x").expect("read").number::<u16>("port").is_err());
    }
}
