"""Checks of published checkpoints by anybody, and exports."""
