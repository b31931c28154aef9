"""What a run's events say about overlap: who waited, how old groups were, and how close it came to waiting for nobody."""
