"""One third-party system a file, and the only place that imports it. Each implements a Protocol of ports/."""
