"""The operator's page: `serving` has its routes, `assets` its files."""
