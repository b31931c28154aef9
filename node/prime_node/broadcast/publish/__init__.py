"""Steps from a policy to signed, compressed encodings."""
