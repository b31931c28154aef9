"""The train backend on torch, for one process and for many."""
