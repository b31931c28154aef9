"""Workers that cheat, for the demo, for tests of the checks and for the table of what they catch. Never on an honest path.

A cheat signs and uploads like any other worker. What is dishonest is its engine (other weights, other tokens, other numbers), or
what it does with leases and bundles on the way to the coordinator. Each idea is a small function; `table.py` lists them all.
"""
