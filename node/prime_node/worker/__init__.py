"""The worker: leases, generates, signs, spools and uploads, while it follows the published policies."""
