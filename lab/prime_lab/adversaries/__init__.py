"""Workers that cheat, for the demo, for tests of the checks and for the table of what they catch. Never used by honest workers.

A cheat signs and uploads like any other worker. The dishonest part is its engine (other weights, other tokens, other
numbers), or its treatment of leases and bundles on the way to the coordinator. Each idea is a small function;
`table.py` lists them all.
"""
