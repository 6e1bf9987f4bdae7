"""The buffers d2t and t2d, by which an EAGLE-3 head says which tokens its own vocabulary has."""

from typing import Any

import numpy as np
import pytest

from jaxspec.hf.eagle3_vocabulary import vocabulary_ids
from jaxspec.inputs.checked import ConfigError

IDS = np.array([0, 2, 3, 7, 8, 10])

pytestmark = pytest.mark.usefixtures("x64")


def buffers(ids: Any, vocab: int = 11) -> dict[str, np.ndarray]:
    return {"d2t": np.array(ids) - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


def test_vocabulary_buffers() -> None:
    """d2t has offsets, not ids; either buffer may be absent; zeros with the whole
    vocabulary are the identity."""
    for tensors in (buffers(IDS), {"d2t": buffers(IDS)["d2t"]}, {"t2d": buffers(IDS)["t2d"]}):
        found = vocabulary_ids(tensors, 6, 11, "here")
        assert found is not None
        assert (found.tolist(), found.dtype) == (IDS.tolist(), np.int32)
    assert vocabulary_ids({}, 11, 11, "here") is None
    assert (
        vocabulary_ids({"d2t": np.zeros(11, int), "t2d": np.zeros(11, bool)}, 11, 11, "here")
        is None
    )


@pytest.mark.parametrize(
    ("tensors", "rows", "said"),
    [
        ({}, 6, "6 rows for a vocabulary of 11, and neither d2t nor t2d"),
        (
            {"d2t": IDS},
            6,
            r"from 0 to 15; they must ascend inside 0\.\.10; it looks like the ids themselves",
        ),
        ({"d2t": np.array([0, 0, -1, 0, 0, 0])}, 6, "must ascend"),
        (
            {**buffers(IDS), "t2d": buffers([0, 1, 2, 3, 4])["t2d"]},
            6,
            "d2t names 6 tokens and t2d 5",
        ),
        ({"d2t": buffers(IDS)["d2t"]}, 7, r"d2t has shape \[6\], and the head 7 rows"),
        (
            {"t2d": np.isin(np.arange(12), IDS)},
            6,
            r"t2d has shape \[12\], and the vocabulary 11 tokens",
        ),
        ({"t2d": np.isin(np.arange(11), IDS)[None]}, 6, r"t2d has shape \[1, 11\]"),
        ({"d2t": np.zeros(11)}, 11, "d2t is of type float64; it must hold whole numbers"),
        ({"d2t": np.zeros(6, bool)}, 6, "d2t is of type bool"),
        ({"t2d": buffers(IDS)["t2d"]}, 7, "t2d names 6 tokens, and the head has 7 rows"),
    ],
)
def test_bad_buffers_are_refused(tensors: Any, rows: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vocabulary_ids(tensors, rows, 11, "here")
