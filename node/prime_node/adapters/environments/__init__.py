"""Third-party problems and their scoring. They run in their own process, away from keys: process.py."""
