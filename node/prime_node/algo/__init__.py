"""The learning itself: losses, advantages, filters, packing, schedules. Pure; found by name or import path."""
