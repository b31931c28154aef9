-- The tables of the first releases, which had no version. They may be there already.
CREATE TABLE IF NOT EXISTS events (number BIGINT NOT NULL, at_ms BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number));
CREATE TABLE IF NOT EXISTS snapshots (number BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number));
CREATE TABLE IF NOT EXISTS receipts (
  bundle VARCHAR(64) NOT NULL, lease_id VARCHAR(64) NOT NULL, worker VARCHAR(64) NOT NULL, step BIGINT NOT NULL,
  status VARCHAR(16) NOT NULL, envelope TEXT NOT NULL, change BIGINT NOT NULL,
  PRIMARY KEY (bundle), UNIQUE (lease_id), UNIQUE (change)
);
CREATE INDEX IF NOT EXISTS receipts_by_worker ON receipts (worker, change);
CREATE TABLE IF NOT EXISTS ledger (number BIGINT NOT NULL, line TEXT NOT NULL, PRIMARY KEY (number));
