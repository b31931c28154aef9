"""The peer network: libp2p, and one in memory."""
