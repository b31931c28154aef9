"""Exchange of pieces between peers: which piece, from which peer, to which peer."""
