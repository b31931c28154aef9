"""Ports: small Protocols for what the roles need from outside. Their docstrings are the contract of every adapter."""
