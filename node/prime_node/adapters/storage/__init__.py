"""Storage of bytes and events."""
