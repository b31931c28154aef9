"""The learning algorithms: losses, advantages, filters, packing, schedules. Pure; found by name or import path."""
