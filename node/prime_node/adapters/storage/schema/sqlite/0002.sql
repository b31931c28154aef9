-- Digests of the rows (row_digests.py). The release that applies this file computes those of the present rows.
ALTER TABLE events ADD COLUMN digest TEXT NOT NULL DEFAULT '';
ALTER TABLE snapshots ADD COLUMN digest TEXT NOT NULL DEFAULT '';
ALTER TABLE receipts ADD COLUMN digest TEXT NOT NULL DEFAULT '';
ALTER TABLE ledger ADD COLUMN digest TEXT NOT NULL DEFAULT ''
