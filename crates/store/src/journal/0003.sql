-- From which epoch on the journal knows whatever was handed to it: one that was begun anew knows nothing of what was before.
CREATE TABLE origin (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    known_from INTEGER NOT NULL
);
