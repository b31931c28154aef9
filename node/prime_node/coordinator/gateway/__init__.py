"""A gateway: it takes connections in front of the writer, the coordinator that decides, and keeps nothing."""
