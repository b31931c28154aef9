"""The coordinator's page: what anyone may see of the run, live, in a browser."""
