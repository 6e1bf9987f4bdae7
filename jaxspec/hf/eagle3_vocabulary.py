"""Vocabulary of EAGLE-3 heads, which may be a part of the policy's."""

from collections.abc import Mapping

import numpy as np

from jaxspec.hf.draft_tensors import NamedArrays
from jaxspec.hf.tensor_files import StoredTensor
from jaxspec.inputs.checked import require


def resize_vocabulary(
    tensors: Mapping[str, StoredTensor], draft_vocab: int, vocab: int
) -> dict[str, StoredTensor]:
    """Pads or cuts the vocabulary of a head.

    Args:
      tensors: tensors of the head, as `normalize_names` returns them.
      draft_vocab: vocabulary rows that the head was made for.
      vocab: vocabulary rows of the policy.
    """
    head = tensors.get("lm_head.weight")
    # A head with a vocabulary of its own keeps its rows and d2t, since token ids do not change.
    names = {"embed_tokens.weight", "t2d"}
    if head is not None and head.shape[:1] == (draft_vocab,):
        names |= {"lm_head.weight", "d2t"}
    return {
        name: tensor.resize_rows(vocab)
        if name in names and tensor.shape[:1] == (draft_vocab,)
        else tensor
        for name, tensor in tensors.items()
    }


def vocabulary_ids(
    tensors: NamedArrays, row_count: int, vocab: int, source: str
) -> np.ndarray | None:
    """Reads the token ids of a head's vocabulary.

    The buffer d2t has the target id minus the draft id of each row. The buffer t2d is a mask over
    the target's tokens.

    Args:
      tensors: tensors of the head, with either or both buffers.
      row_count: rows of the head.
      vocab: vocabulary rows of the target.
      source: name of the file in messages.

    Returns:
      The ids, or None if the head has all tokens in order.

    Raises:
      ConfigError: the ids do not ascend within the target's vocabulary, or the buffers disagree.
    """
    offsets, mask = tensors.get("d2t"), tensors.get("t2d")
    _check_buffers(offsets, mask, row_count, vocab, source)
    if row_count == vocab and (offsets is None or not offsets.any()):
        return None
    require(
        offsets is not None or mask is not None,
        f"{source} has {row_count} rows for a vocabulary of {vocab}, and neither d2t nor t2d to say"
        " which",
    )
    ids = np.zeros(0, int) if mask is None else np.flatnonzero(mask)
    if offsets is not None:
        ids = _offsets_to_ids(offsets, vocab, source)
    if mask is not None:
        mask_ids = np.flatnonzero(mask)
        require(
            np.array_equal(ids, mask_ids),
            f"{source}: d2t names {ids.size} tokens and t2d {mask_ids.size}, and not the same ones",
        )
    require(
        ids.size == row_count,
        f"{source}: t2d names {ids.size} tokens, and the head has {row_count} rows",
    )
    return ids.astype(np.int32)


def _check_buffers(
    offsets: np.ndarray | None, mask: np.ndarray | None, row_count: int, vocab: int, source: str
) -> None:
    """Checks the types and shapes of d2t and t2d."""
    for name, buffer, size, dtype_kinds in (
        ("d2t", offsets, row_count, "iu"),
        ("t2d", mask, vocab, "biu"),
    ):
        if buffer is not None:
            require(
                buffer.dtype.kind in dtype_kinds,
                f"{source}: {name} is of type {buffer.dtype}; it must hold whole numbers, or t2d a"
                " mask",
            )
            message = f"{source}: {name} has shape {list(buffer.shape)}, and"
            expected = (
                f"the head {row_count} rows" if name == "d2t" else f"the vocabulary {vocab} tokens"
            )
            require(buffer.shape == (size,), f"{message} {expected}")


def _offsets_to_ids(offsets: np.ndarray, vocab: int, source: str) -> np.ndarray:
    """Returns the ids that d2t stores as offsets."""
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    fits = bool((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < vocab)
    # A likely mistake is to store the ids themselves.
    is_absolute = bool((np.diff(offsets) > 0).all() and offsets[0] >= 0 and offsets[-1] < vocab)
    hint = (
        "; it looks like the ids themselves, but must hold target id - draft id"
        if is_absolute
        else ""
    )
    require(
        fits,
        f"{source}: ids i + d2t[i] run from {ids.min()} to {ids.max()}; they must ascend inside"
        f" 0..{vocab - 1}{hint}",
    )
    return ids


def vocabulary_buffers(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """Returns d2t and t2d of a head's vocabulary.

    Args:
      ids: token ids of the head's rows, ascending.
      vocab: vocabulary rows of the target.
    """
    # Both buffers are written, because readers differ in the one that they use.
    return {"d2t": ids - np.arange(ids.size), "t2d": np.isin(np.arange(vocab), ids)}
