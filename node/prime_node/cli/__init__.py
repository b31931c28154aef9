"""The command line: one file a command. wire.py is the only place where adapters are chosen."""
