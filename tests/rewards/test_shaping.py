"""What length takes from a reward."""

import numpy as np
import pytest

from jaxspec.rewards.shaping import overlong_penalty


def test_an_answer_loses_along_a_line_from_the_buffer_on() -> None:
    """Of 100 tokens the last 20: 90 lose half of it, whatever the penalty."""
    lengths = np.array([1, 80, 81, 90, 100])
    np.testing.assert_allclose(
        overlong_penalty(lengths, 100, 0.2, 1.0), [0, 0, -0.05, -0.5, -1], atol=1e-12
    )
    np.testing.assert_allclose(
        overlong_penalty(lengths, 100, 0.2, 3.0), [0, 0, -0.15, -1.5, -3], atol=1e-12
    )


@pytest.mark.parametrize("penalty", [1.0, 5.0])
def test_without_a_buffer_nothing_is_lost(penalty: float) -> None:
    assert not overlong_penalty(np.array([1, 50, 100]), 100, 0.0, penalty).any()
