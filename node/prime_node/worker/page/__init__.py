"""The worker's page on loopback: what this machine does for a run, and its contributor's controls."""
