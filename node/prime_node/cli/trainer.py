"""`prime-node trainer`: consumes accepted rollouts and publishes policies."""
from __future__ import annotations
def trainer() -> None:
    """placeholder until the trainer lands"""
