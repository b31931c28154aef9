"""The validator: judges bundles by one forward pass of the claimed policy, and computes their rewards."""
