"""Entry point: `python -m prime_node` is `prime-node`."""

from prime_node.cli.main import main

main()
