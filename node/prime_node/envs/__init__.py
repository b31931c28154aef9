"""Problems and their scoring: built-in environments. Problems come from a ProblemSource; adapters wrap third-party ones."""
