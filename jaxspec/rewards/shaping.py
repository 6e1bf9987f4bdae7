"""What is taken from a reward for how an answer was given, whatever it says."""

import numpy as np
from jaxtyping import Float, Int


def overlong_penalty(
    lengths: Int[np.ndarray, " B"], max_length: int, buffer_fraction: float, penalty: float
) -> Float[np.ndarray, " B"]:
    """0 for answers of up to (1 - buffer_fraction) * max_length tokens; from there it falls along a
    line to -penalty at `max_length`. Without a `buffer_fraction`, nothing.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not buffer_fraction:
        return np.zeros(len(lengths))
    buffer_tokens = buffer_fraction * max_length
    return np.minimum((max_length - buffer_tokens - lengths) / buffer_tokens * penalty, 0.0)
