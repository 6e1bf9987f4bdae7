"""Folders of a tiny policy's weights, whole or in several files, and what is read from them."""

from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file

from jaxspec.hf import tensor_files
from jaxspec.hf.pretrained import HfCheckpoint, load_policy_config, open_policy_checkpoint
from jaxspec.hf.tensor_files import WEIGHTS_FILE, write_tensors
from jaxspec.inputs.json_keys import read_json
from jaxspec.inputs.spec import ModelSpec
from jaxspec.mesh import TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from tests.conftest import small_mesh, tiny_model

MODEL = tiny_model(dtype="float32")


def split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same checkpoint in several files with an index."""
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 4000)
    tensors = load_file(folder / WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()
    list(
        write_tensors(
            folder,
            [(name, value.nbytes, lambda value=value: value) for name, value in tensors.items()],
        )
    )
    return folder


def shapes_of(config: ModelSpec, data: int = 1, tensor: int = 1) -> Any:
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    placed = assign_shardings(small_mesh(data, tensor), shapes, TRAIN_RULES)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        placed,
    )


def opened(folder: Path, **model: Any) -> HfCheckpoint:
    config = load_policy_config(ModelSpec(path=str(folder), **model))
    return open_policy_checkpoint(config, shapes_of(config))


NORM = "model.norm.weight"


def file_of(folder: Path, tensor: str) -> str:
    return read_json(folder / f"{WEIGHTS_FILE}.index.json")["weight_map"][tensor]
