"""What is taken from a reward for how an answer was given, whatever it says."""

import numpy as np
from jaxtyping import Float, Int


def overlong_penalty(
    lengths: Int[np.ndarray, " B"], longest: int, buffer: float, penalty: float
) -> Float[np.ndarray, " B"]:
    """0 for answers of up to (1 - buffer) * longest tokens; from there it falls along a line to
    -penalty at `longest`. Without a `buffer`, nothing.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not buffer:
        return np.zeros(len(lengths))
    tokens = buffer * longest
    return np.minimum((longest - tokens - lengths) / tokens * penalty, 0.0)
