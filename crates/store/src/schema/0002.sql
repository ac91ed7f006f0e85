-- The session that a DELETE is owed for; none where that was not kept. It repeats what is sealed.
ALTER TABLE owed ADD COLUMN session BLOB;
CREATE INDEX owed_by_session ON owed (session, id) WHERE session IS NOT NULL;
