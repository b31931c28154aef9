"""One third-party system per file, and the only place that imports it. Each implements a Protocol of ports/."""
