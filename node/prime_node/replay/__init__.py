"""From the coordinator's batches to groups that can be trained on."""
