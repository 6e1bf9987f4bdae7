"""Laws of whole responses, by enumeration, and how well samples agree with them."""

import numpy as np
import pytest

from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Processing
from jaxspec.state import Rollout
from tests.conftest import chi_square
from tests.rollout.harness import numpy_processed
from tests.twins import numpy_decoder


def sequence_law(
    target: Decoder, prompt: list[int], processing: Processing, new: int
) -> dict[tuple[int, ...], float]:
    """Every possible response and its probability, by plain decoding in numpy."""
    law, open_prefixes = {}, {(): 1.0}
    for _ in range(new):
        longer = {}
        for prefix, mass in open_prefixes.items():
            probabilities = numpy_processed(
                numpy_decoder(target, [*prompt, *prefix])[0][-1], processing, len(prefix)
            )
            for token in np.flatnonzero(probabilities).tolist():
                (law if token in processing.stop_ids else longer)[*prefix, token] = (
                    mass * probabilities[token]
                )
        open_prefixes = longer
    return law | open_prefixes


def law_p_value(rollout: Rollout, rows: np.ndarray, law: dict[tuple[int, ...], float]) -> float:
    """The p-value of the responses in some rows under a law of `sequence_law`."""
    assert sum(law.values()) == pytest.approx(1)
    index = {sequence: place for place, sequence in enumerate(law)}
    found = [
        tuple(rollout.tokens[row, rollout.prompt_lengths[row] : rollout.lengths[row]].tolist())
        for row in rows
    ]
    assert not set(found) - set(index), "sequences that cannot occur"
    counts = np.bincount([index[sequence] for sequence in found], minlength=len(law))
    return chi_square(counts, len(rows) * np.array(list(law.values())))
