"""The inner loops of the CLASS mode, compiled by numba. Import only where they pay."""
