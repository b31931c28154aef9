-- Segments of the archived journal (ports/store.py). `number` is that of a segment's last event. `num_bytes` is the length of
-- its payload, so that a start that counts them reads none.
CREATE TABLE journal (
  number bigint PRIMARY KEY, first bigint NOT NULL, chapter bigint NOT NULL, at_ms bigint NOT NULL,
  num_bytes bigint NOT NULL, payload text NOT NULL, digest text NOT NULL
);

DROP FUNCTION save_snapshot;

-- The last event stays: its number is that of the state. There is nothing to archive where `segment` is NULL.
CREATE FUNCTION save_snapshot(
  mine bigint, at_event bigint, state text, state_digest text, kept_from bigint,
  segment_last bigint, segment_first bigint, segment_chapter bigint, segment_ms bigint, segment_bytes bigint,
  segment text, segment_digest text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM require_epoch(mine);
  DELETE FROM snapshots;
  INSERT INTO snapshots (number, payload, digest) VALUES (at_event, state, state_digest);
  IF segment IS NOT NULL THEN
    INSERT INTO journal (number, first, chapter, at_ms, num_bytes, payload, digest)
      VALUES (segment_last, segment_first, segment_chapter, segment_ms, segment_bytes, segment, segment_digest);
  END IF;
  DELETE FROM journal WHERE chapter < kept_from;
  DELETE FROM events WHERE number < at_event;
END $$;
