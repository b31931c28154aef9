"""Which completions of the probe are compared with a forward pass. The probe itself: tests/conformance/."""

from __future__ import annotations

from prime_node.adapters.engines.vllm_probe import PROBE_PROMPTS, compared_after


def test_the_first_load_compares_the_whole_probe() -> None:
    assert range(PROBE_PROMPTS)[compared_after(0)] == range(PROBE_PROMPTS)


def test_swaps_compare_a_part_of_it_and_all_of_it_in_turn() -> None:
    found = [list(range(PROBE_PROMPTS)[compared_after(loads)]) for loads in range(1, 9)]
    assert {len(some) for some in found} == {2}
    assert sorted(number for some in found[:4] for number in some) == list(range(PROBE_PROMPTS))
    assert found[4:] == found[:4]
