"""The learning itself: losses, advantages, filters, packing, schedules. Pure; one algorithm a file, found by name or import path."""
