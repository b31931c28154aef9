"""Ports: what the roles need of the world, as small Protocols. Their docstrings are the contract of every adapter."""
