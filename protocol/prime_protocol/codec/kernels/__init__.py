"""Inner loops of the CLASS mode, compiled by numba. Import this package only for large tensors."""
