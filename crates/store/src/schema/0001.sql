-- Facts about the ledger as a whole: epoch, clock, boot, keys.
CREATE TABLE meta (
    name TEXT NOT NULL PRIMARY KEY,
    value ANY NOT NULL
) STRICT, WITHOUT ROWID;

-- One row a live session. The key is the SHA-256 of its id; body and key are signed; deadline, seen_at and confirmed are
-- hints beside the signature; the other columns repeat what the body says, and are compared with it.
CREATE TABLE sessions (
    key BLOB NOT NULL PRIMARY KEY,
    state INTEGER NOT NULL,
    server TEXT NOT NULL,
    principal TEXT NOT NULL,
    agent TEXT,
    generation INTEGER NOT NULL,
    deadline INTEGER NOT NULL,
    seen_at INTEGER NOT NULL,
    confirmed INTEGER NOT NULL,
    key_id INTEGER NOT NULL,
    mac BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX sessions_by_deadline ON sessions (deadline);
CREATE INDEX sessions_draining ON sessions (key) WHERE state = 2;
CREATE INDEX sessions_by_principal ON sessions (principal, key);

-- One row an ended session. As long as it exists its id is blocked. keep_until is a hint; the other columns repeat what
-- the body says.
CREATE TABLE tombstones (
    key BLOB NOT NULL PRIMARY KEY,
    state INTEGER NOT NULL,
    server TEXT NOT NULL,
    principal TEXT NOT NULL,
    agent TEXT,
    keep_until INTEGER NOT NULL,
    key_id INTEGER NOT NULL,
    mac BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX tombstones_by_keep_until ON tombstones (keep_until);

-- What a later worker needs to go on with an instance. Sealed: it holds the upstream's session id.
CREATE TABLE resumes (
    key BLOB NOT NULL PRIMARY KEY,
    server TEXT NOT NULL,
    used_at INTEGER NOT NULL,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL
) STRICT;
CREATE INDEX resumes_by_used_at ON resumes (used_at);

-- DELETEs still owed to upstreams. Sealed, too.
CREATE TABLE owed (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    server TEXT NOT NULL,
    next_at INTEGER NOT NULL,
    owed_at INTEGER NOT NULL,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL
) STRICT;
CREATE INDEX owed_by_next_at ON owed (next_at, id);

-- Who did what, one row an act, the oldest first. Body and number are signed; the other columns repeat what the body says.
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    action INTEGER NOT NULL,
    session BLOB,
    key_id INTEGER NOT NULL,
    mac BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;

-- What a server last said of itself.
CREATE TABLE cards (
    server TEXT NOT NULL PRIMARY KEY,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL
) STRICT, WITHOUT ROWID;
