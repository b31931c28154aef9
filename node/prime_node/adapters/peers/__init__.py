"""Peer networks: one over libp2p, and one in memory."""
