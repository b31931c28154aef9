-- Digests of the rows (row_digests.py). The release that applies this file computes those of the present rows.
ALTER TABLE events ADD COLUMN digest text NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN digest text NOT NULL DEFAULT '';
ALTER TABLE receipts ADD COLUMN digest text NOT NULL DEFAULT '';
ALTER TABLE ledger ADD COLUMN digest text NOT NULL DEFAULT '';

DROP FUNCTION append_events;
DROP FUNCTION save_snapshot;

CREATE FUNCTION append_events(
  mine bigint, first_event bigint, times bigint[], payloads text[], event_digests text[],
  first_change bigint, bundles text[], leases text[], workers text[], steps bigint[], statuses text[], envelopes text[],
  receipt_digests text[], first_line bigint, lines text[], line_digests text[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM require_epoch(mine);
  INSERT INTO events (number, at_ms, payload, digest)
    SELECT first_event + place - 1, at_ms, payload, digest
    FROM unnest(times, payloads, event_digests) WITH ORDINALITY AS one (at_ms, payload, digest, place);
  IF cardinality(bundles) > 0 THEN
    INSERT INTO receipts (bundle, lease_id, worker, step, status, envelope, digest, change)
      SELECT bundle, lease_id, worker, step, status, envelope, digest, first_change + place - 1
      FROM unnest(bundles, leases, workers, steps, statuses, envelopes, receipt_digests) WITH ORDINALITY
        AS one (bundle, lease_id, worker, step, status, envelope, digest, place)
      ON CONFLICT (bundle) DO UPDATE SET (lease_id, worker, step, status, envelope, digest, change) =
        (excluded.lease_id, excluded.worker, excluded.step, excluded.status, excluded.envelope, excluded.digest, excluded.change);
  END IF;
  IF cardinality(lines) > 0 THEN
    INSERT INTO ledger (number, line, digest)
      SELECT first_line + place - 1, line, digest
      FROM unnest(lines, line_digests) WITH ORDINALITY AS one (line, digest, place);
  END IF;
END $$;

-- The last event stays: its number is that of the state.
CREATE FUNCTION save_snapshot(mine bigint, at_event bigint, state text, state_digest text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM require_epoch(mine);
  DELETE FROM snapshots;
  INSERT INTO snapshots (number, payload, digest) VALUES (at_event, state, state_digest);
  DELETE FROM events WHERE number < at_event;
END $$;
