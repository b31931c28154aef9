"""HTTP: the daemon's server, the client, and what peers ask of one another."""
