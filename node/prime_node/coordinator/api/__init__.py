"""The coordinator's HTTP API: one file per kind of caller or resource, and the checks that every request passes."""
