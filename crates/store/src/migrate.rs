//! The schema of the SQLite ledger, as a list of steps. A step that was released is never changed again.

use rusqlite::{Connection, TransactionBehavior};

/// Step `n` leads from schema version `n` to `n + 1`.
pub(crate) const STEPS: &[&str] =
    &[include_str!("schema/0001.sql"), include_str!("schema/0002.sql"), include_str!("schema/0003.sql")];

/// Marks a SQLite file as a ledger: "MSTN".
pub(crate) const APPLICATION_ID: i32 = 0x4d53_544e;

/// Why a schema can't be brought up to date.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The file's version is not known here.
    Newer { found: u32, known: u32 },
    /// The file is not a ledger.
    Alien,
    /// SQLite refused; the version is what it was.
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for Refused {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

/// Brings the schema to the version after the last of `steps`: all of what is missing, in one transaction, or nothing.
/// Does nothing to one that is there already.
pub(crate) fn migrate(connection: &mut Connection, steps: &[&str]) -> Result<(), Refused> {
    let known = u32::try_from(steps.len()).unwrap_or(u32::MAX);
    if version(connection)? == known {
        return Ok(());
    }
    // From here on nobody else migrates; somebody may have done so just now.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found = version(&transaction)?;
    if found > known {
        return Err(Refused::Newer { found, known });
    }
    if found == 0 {
        let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        if tables > 0 {
            return Err(Refused::Alien);
        }
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    }
    for step in steps.iter().skip(usize::try_from(found).unwrap_or(usize::MAX)) {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", known)?;
    transaction.commit()?;
    Ok(())
}

/// The version of a ledger's schema, and the newest that is known here.
pub(crate) fn versions(connection: &Connection) -> Result<(u32, u32), Refused> {
    Ok((version(connection)?, u32::try_from(STEPS.len()).unwrap_or(u32::MAX)))
}

/// The version of a ledger's schema; 0 if there is none.
fn version(connection: &Connection) -> Result<u32, Refused> {
    let application: i32 = connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let version: u32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let blank = application == 0 && version == 0;
    if application == APPLICATION_ID || blank { Ok(version) } else { Err(Refused::Alien) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATER: [&str; 5] = [
        STEPS[0],
        STEPS[1],
        STEPS[2],
        "ALTER TABLE cards ADD COLUMN note TEXT; CREATE TABLE extra (id INTEGER PRIMARY KEY)",
        "INSERT INTO extra (id) VALUES (7)",
    ];

    fn schema(connection: &Connection) -> Vec<String> {
        let sql = "SELECT name || ': ' || coalesce(sql, '') FROM sqlite_schema ORDER BY name";
        let mut statement = connection.prepare(sql).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    fn extra(connection: &Connection) -> i64 {
        connection.query_row("SELECT count(*) FROM extra", [], |row| row.get(0)).unwrap()
    }

    #[test]
    fn every_version_leads_to_the_newest_and_twice_is_once() {
        let mut straight = Connection::open_in_memory().unwrap();
        migrate(&mut straight, &LATER).unwrap();
        for start in 0..=LATER.len() {
            let mut connection = Connection::open_in_memory().unwrap();
            migrate(&mut connection, &LATER[..start]).unwrap();
            for _ in 0..2 {
                migrate(&mut connection, &LATER).unwrap();
                assert_eq!(schema(&connection), schema(&straight), "from {start}");
                assert_eq!(extra(&connection), 1, "from {start}");
            }
        }
    }

    #[test]
    fn the_shipped_steps_apply_twice() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, STEPS).unwrap();
        let once = schema(&connection);
        migrate(&mut connection, STEPS).unwrap();
        assert_eq!(schema(&connection), once);
    }

    #[test]
    fn a_newer_schema_is_refused_and_left_alone() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, &LATER).unwrap();
        let refused = migrate(&mut connection, STEPS);
        assert!(matches!(refused, Err(Refused::Newer { found: 5, known: 3 })), "{refused:?}");
        assert_eq!(extra(&connection), 1);
    }

    #[test]
    fn a_step_that_fails_leaves_the_version_that_was() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, STEPS).unwrap();
        let before = schema(&connection);
        let refused =
            migrate(&mut connection, &[STEPS[0], STEPS[1], STEPS[2], LATER[3], "INSERT INTO nowhere VALUES (1)"]);
        assert!(matches!(refused, Err(Refused::Sqlite(_))), "{refused:?}");
        assert_eq!(schema(&connection), before);
        migrate(&mut connection, &LATER).unwrap();
    }

    #[test]
    fn the_database_of_another_program_is_refused() {
        let mut tables = Connection::open_in_memory().unwrap();
        tables.execute_batch("CREATE TABLE theirs (id)").unwrap();
        let mut marked = Connection::open_in_memory().unwrap();
        marked.pragma_update(None, "application_id", 1).unwrap();
        for connection in [&mut tables, &mut marked] {
            let refused = migrate(connection, STEPS);
            assert!(matches!(refused, Err(Refused::Alien)), "{refused:?}");
        }
    }
}
