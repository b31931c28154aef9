"""Problems and their scoring: what is ours. Where the problems come from is a ProblemSource; adapters wrap foreign ones."""
