"""From a policy to signed, compressed encodings."""
