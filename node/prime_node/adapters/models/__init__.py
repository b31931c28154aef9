"""Causal language models of Hugging Face, and their tokenizers."""
