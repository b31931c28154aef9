"""Foreign problems and their scoring. It runs in a process of its own, away from keys: process.py."""
