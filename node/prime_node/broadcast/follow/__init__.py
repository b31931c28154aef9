"""From the newest head to verified weights."""
