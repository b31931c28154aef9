-- The leader counts `renewals` up several times in a term of `term_ms`. Another coordinator takes over after it has seen no change
-- for a term by its own clock, so no clocks are compared. A term of 0 has ended.
ALTER TABLE leader ADD COLUMN renewals bigint NOT NULL DEFAULT 0, ADD COLUMN term_ms bigint NOT NULL DEFAULT 0;

-- With this index a change of the epoch waits for FOR KEY SHARE, and a renewal does not.
CREATE UNIQUE INDEX leader_by_epoch ON leader (epoch);

CREATE OR REPLACE FUNCTION require_epoch(mine bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM leader WHERE epoch = mine FOR KEY SHARE;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'another coordinator has taken over this database' USING ERRCODE = 'PR001';
  END IF;
END $$;

-- Documents of the run's folder that each coordinator needs. `change` is the order of the last writes.
CREATE SEQUENCE document_changes;
CREATE TABLE documents (
  room text NOT NULL, name text NOT NULL, data bytea NOT NULL, change bigint NOT NULL UNIQUE, PRIMARY KEY (room, name)
);

CREATE FUNCTION write_document(mine bigint, in_room text, under text, bytes bytea) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE made bigint;
BEGIN
  PERFORM require_epoch(mine);
  LOCK TABLE documents IN SHARE ROW EXCLUSIVE MODE;  -- so that a reader never sees a later change first
  made := nextval('document_changes');
  INSERT INTO documents (room, name, data, change) VALUES (in_room, under, bytes, made)
    ON CONFLICT (room, name) DO UPDATE SET (data, change) = (excluded.data, excluded.change);
  RETURN made;
END $$;
