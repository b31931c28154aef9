"""HTTP: the daemon's server, the client, and requests between peers."""
