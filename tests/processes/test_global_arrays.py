"""Which process has which rows of a global array."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxspec.processes import global_arrays
from tests.conftest import small_mesh


class Device(NamedTuple):
    """What `locate_rows` asks of a device."""

    id: int
    process_index: int


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_row_is_owned_once_also_where_tensor_spans_processes(
    monkeypatch: pytest.MonkeyPatch, tensor: int
) -> None:
    """Four processes of two devices each."""
    rows, shards = 16, 8 // tensor
    width = rows // shards
    indices = {
        Device(number, number // 2): (
            slice(number // tensor * width, (number // tensor + 1) * width),
        )
        for number in range(8)
    }
    monkeypatch.setattr(
        global_arrays,
        "row_sharding",
        lambda _: SimpleNamespace(devices_indices_map=lambda _: indices),
    )
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    copies, owners = global_arrays.locate_rows(small_mesh(8 // tensor, tensor), rows)
    np.testing.assert_array_equal(copies.sum(axis=0), max(1, tensor // 2))
    np.testing.assert_array_equal(owners, copies.argmax(axis=0))
    # The first of a shard's devices is on the process of this number.
    np.testing.assert_array_equal(owners, np.repeat(np.arange(shards) * tensor // 2, width))
