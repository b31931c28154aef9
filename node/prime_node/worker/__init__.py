"""The worker: leases, generates, signs, spools, uploads; follows the published policies beside it."""
