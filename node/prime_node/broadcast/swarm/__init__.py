"""Pieces: which, from whom, and to whom."""
