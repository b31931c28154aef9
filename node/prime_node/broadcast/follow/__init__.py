"""Steps from the newest head to verified weights."""
