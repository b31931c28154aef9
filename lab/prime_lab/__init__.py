"""Parts for tests and benchmarks, which no wheel contains: simulators, workers that cheat, adapters in memory, a slow codec."""
