"""`torchrun --nproc-per-node N -m prime_node.trainer RUN ...` is `prime-node trainer RUN ...` on every rank."""

import sys

from prime_node.cli.main import main

sys.argv[1:1] = ["trainer"]
main()
