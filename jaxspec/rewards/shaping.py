"""Penalties for the form of a response."""

import numpy as np
from jaxtyping import Float, Int


def overlong_penalty(
    lengths: Int[np.ndarray, " B"], max_length: int, buffer_fraction: float, penalty: float
) -> Float[np.ndarray, " B"]:
    """Computes DAPO's soft penalty for long responses.

    It is 0 up to (1 - buffer_fraction) * max_length tokens, and then falls linearly to -penalty at
    `max_length`. It is 0 everywhere if `buffer_fraction` is 0.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    # Without a buffer the slope below would be a division by zero.
    if not buffer_fraction:
        return np.zeros(len(lengths))
    buffer_tokens = buffer_fraction * max_length
    return np.minimum((max_length - buffer_tokens - lengths) / buffer_tokens * penalty, 0.0)
