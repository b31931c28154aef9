"""A simulated run finds each fault that is put into the code of gateways."""

from __future__ import annotations

import pytest
from tests.node.seeded_mutants_world import MUTANTS, Mutant, finding


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_in_the_code_of_gateways_is_found(mutant: Mutant) -> None:
    """The same seed passes without it, in test_seeded_faults.py."""
    assert finding(mutant, mutant.seed) is not None, mutant.name
