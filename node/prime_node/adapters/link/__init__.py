"""The link between gateways and the writer, over TCP."""
