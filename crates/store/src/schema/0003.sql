-- How many sessions ended how is counted without a look at their rows.
CREATE INDEX tombstones_by_state ON tombstones (state);
