CREATE TABLE events (number bigint PRIMARY KEY, at_ms bigint NOT NULL, payload text NOT NULL);
CREATE TABLE snapshots (number bigint PRIMARY KEY, payload text NOT NULL);
CREATE TABLE receipts (
  bundle text PRIMARY KEY, lease_id text NOT NULL UNIQUE, worker text NOT NULL, step bigint NOT NULL,
  status text NOT NULL, envelope text NOT NULL, change bigint NOT NULL UNIQUE
);
CREATE INDEX receipts_by_worker ON receipts (worker, change);
CREATE TABLE ledger (number bigint PRIMARY KEY, line text NOT NULL);

-- One row. The coordinator that opens the store for writing takes the next epoch; a write in an older one fails.
CREATE TABLE leader (single boolean PRIMARY KEY DEFAULT true CHECK (single), epoch bigint NOT NULL, holder text NOT NULL);
INSERT INTO leader (epoch, holder) VALUES (0, '');

-- FOR SHARE: a change of the epoch waits until the writes of the present one have ended.
CREATE FUNCTION require_epoch(mine bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM leader WHERE epoch = mine FOR SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'another coordinator has taken over this database' USING ERRCODE = 'PR001';
  END IF;
END $$;

CREATE FUNCTION append_events(
  mine bigint, first_event bigint, times bigint[], payloads text[],
  first_change bigint, bundles text[], leases text[], workers text[], steps bigint[], statuses text[], envelopes text[],
  first_line bigint, lines text[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM require_epoch(mine);
  INSERT INTO events (number, at_ms, payload)
    SELECT first_event + place - 1, at_ms, payload
    FROM unnest(times, payloads) WITH ORDINALITY AS one (at_ms, payload, place);
  IF cardinality(bundles) > 0 THEN
    INSERT INTO receipts (bundle, lease_id, worker, step, status, envelope, change)
      SELECT bundle, lease_id, worker, step, status, envelope, first_change + place - 1
      FROM unnest(bundles, leases, workers, steps, statuses, envelopes) WITH ORDINALITY
        AS one (bundle, lease_id, worker, step, status, envelope, place)
      ON CONFLICT (bundle) DO UPDATE SET (lease_id, worker, step, status, envelope, change) =
        (excluded.lease_id, excluded.worker, excluded.step, excluded.status, excluded.envelope, excluded.change);
  END IF;
  IF cardinality(lines) > 0 THEN
    INSERT INTO ledger (number, line)
      SELECT first_line + place - 1, line FROM unnest(lines) WITH ORDINALITY AS one (line, place);
  END IF;
END $$;

-- The last event stays: its number is that of the state.
CREATE FUNCTION save_snapshot(mine bigint, at_event bigint, state text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM require_epoch(mine);
  DELETE FROM snapshots;
  INSERT INTO snapshots (number, payload) VALUES (at_event, state);
  DELETE FROM events WHERE number < at_event;
END $$;
