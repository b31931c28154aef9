"""Distribution of checkpoints: the publisher's side and the followers' side."""
