-- Segments of the archived journal (ports/store.py). `number` is that of a segment's last event. `num_bytes` is the length of
-- its payload, so that a start that counts them reads none.
CREATE TABLE journal (
  number BIGINT NOT NULL, first BIGINT NOT NULL, chapter BIGINT NOT NULL, at_ms BIGINT NOT NULL,
  num_bytes BIGINT NOT NULL, payload TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (number)
)
