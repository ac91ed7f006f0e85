-- An answer on its way to the server (sealed): which worker forwards it, and since when the server has it.
ALTER TABLE questions ADD COLUMN answered_by INTEGER;
ALTER TABLE questions ADD COLUMN answer_key_id INTEGER;
ALTER TABLE questions ADD COLUMN answer BLOB;
CREATE INDEX questions_unforwarded ON questions (answered_by) WHERE answer IS NOT NULL;
