"""The validator: verifies bundles by one forward pass of the claimed policy, and computes their rewards."""
