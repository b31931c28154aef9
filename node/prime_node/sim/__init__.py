"""Simulators for tests and experiments: virtual time, networks, and workers that cheat."""
