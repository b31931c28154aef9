"""The coordinator's state machine: events in, a new state and effects out. Pure: no clock, no I/O, no randomness of its own."""
