"""Training sees the numbers that generation saw, over steps of an optimizer."""

import pytest

from tests.support.grpo import FAMILIES, PRECISIONS, steps


@pytest.mark.crossed(4)
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_training_are_those_of_the_rollouts(family, precision, lora):
    if lora:
        pytest.importorskip("peft")
    found = steps(family, precision, 2, lora)
    assert [step.exact for step in found] == [0.0] * 2
    assert max(step.plain for step in found) > 0, "the control"
