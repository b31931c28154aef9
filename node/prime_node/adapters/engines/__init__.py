"""Engines and scorers: transformers and vLLM."""
