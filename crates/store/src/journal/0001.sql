-- Of each session that something is kept of: how much. The bounds are those of retention.
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    session BLOB NOT NULL UNIQUE,
    events INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX sessions_over ON sessions (id) WHERE events > 1024 OR bytes > 8388608;

-- Who may append, how far it has come, and how far the server's own stream was read (sealed).
CREATE TABLE streams (
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    claim_counter INTEGER NOT NULL,
    claim_nonce INTEGER NOT NULL,
    last_sequence INTEGER NOT NULL DEFAULT 0,
    delivered INTEGER NOT NULL DEFAULT 0,
    ending INTEGER NOT NULL DEFAULT 0,
    events INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    changed_at INTEGER NOT NULL,
    source_key_id INTEGER,
    source BLOB,
    UNIQUE (session, epoch, number)
);
CREATE INDEX streams_by_change ON streams (changed_at);
CREATE INDEX streams_done ON streams (changed_at) WHERE ending > 0 AND delivered >= last_sequence;

-- The call that a stream answers (sealed).
CREATE TABLE calls (
    stream INTEGER PRIMARY KEY,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL
);

-- Events in the order in which they were kept. Their columns repeat what is sealed, for retention.
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    stream INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    ending INTEGER NOT NULL,
    weight INTEGER NOT NULL,
    at INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL
);
CREATE UNIQUE INDEX events_by_stream ON events (stream, sequence);
CREATE INDEX events_passing ON events (id) WHERE weight = 0;

-- The server's questions, open and answered.
CREATE TABLE questions (
    id INTEGER PRIMARY KEY,
    session INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    deadline INTEGER NOT NULL,
    answered_at INTEGER,
    key_id INTEGER NOT NULL,
    sealed BLOB NOT NULL,
    UNIQUE (session, epoch, number)
);
CREATE INDEX questions_by_deadline ON questions (deadline);
CREATE INDEX questions_open ON questions (deadline) WHERE answered_at IS NULL;
CREATE INDEX questions_answered ON questions (answered_at) WHERE answered_at IS NOT NULL;
