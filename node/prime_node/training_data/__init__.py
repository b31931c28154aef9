"""Training data: which groups a batch takes, how stale they are, and from a signed batch to verified groups."""
