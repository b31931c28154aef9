"""The command line: one file per command. Only wire.py chooses adapters."""
