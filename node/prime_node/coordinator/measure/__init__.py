"""Measurement of overlap from a run's events: waiting times, the age of groups, and the closeness to a scheduler without cost."""
