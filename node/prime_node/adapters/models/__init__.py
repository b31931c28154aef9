"""Causal language models from Hugging Face, and their tokenizers."""
