"""Where bytes and events are kept."""
