"""Training data of a draft: responses of the policy or a text, and the draft's vocabulary."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int32

from jaxspec import mesh as meshes
from jaxspec.config.settings import OfflineConfig, ResolvedConfig
from jaxspec.data import arithmetic
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.problems import load_sets, pad_prompts
from jaxspec.data.texts import TextFile
from jaxspec.host.programs import abstract_prompts, compile_answerer, put_like
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream, stream_rng
from jaxspec.models.decoder import Decoder
from jaxspec.rl.learner import Learner
from jaxspec.rl.train_batch import PolicyStates, build_text_batch
from jaxspec.rollout.generator import Generator
from jaxspec.state import FAILED, Prompts, PyTree, Rollout, RolloutWeights
from jaxspec.system.progress import Progress
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer
from jaxspec.transfer import export_weights

Responder = Callable[[int], SftBatch]
"""Function that samples a batch of responses by its number."""
HELD_OUT_INTERVAL = 16
"""One batch of responses in this many is held out from training."""
MAX_STATE_BYTES = 4 << 30
"""Limit on the bytes of kept policy states. A quarter of the machine's memory is another limit."""


class TextRows(NamedTuple):
    """Sequences to train or measure a draft on."""

    tokens: Int32[np.ndarray, "rows length"]
    mask: Bool[np.ndarray, "rows length"]
    """Loss mask: responses, assistant turns of a chat, or all tokens of a text."""


def rows_from_sft(batch: SftBatch) -> TextRows:
    """Returns rows whose loss mask covers the responses."""
    positions = np.arange(batch.tokens.shape[1])
    return TextRows(
        batch.tokens,
        (positions >= batch.prompt_lengths[:, None]) & (positions < batch.lengths[:, None]),
    )


def hold_out_batches(offline: OfflineConfig) -> tuple[range, range]:
    """Splits batch numbers into training and held-out ones.

    The last batches are held out, at least one.
    """
    count = -(-offline.samples // offline.rows)
    first = count - max(1, count // HELD_OUT_INTERVAL)
    return range(first), range(first, count)


def abstract_responses(config: ResolvedConfig, mesh: Mesh) -> SftBatch:
    """Describes a batch of responses without allocating it."""
    rows, replicated = config.offline.rows, meshes.replicated_sharding(mesh)
    leaves: list[Any] = [
        jax.ShapeDtypeStruct(shape, np.int32, sharding=replicated)
        for shape in ((rows, config.row_length), (rows,), (rows,))
    ]
    return SftBatch(*leaves)


def make_responder(
    config: ResolvedConfig, generator: Generator, tokenizer: Tokenizer, policy: Decoder
) -> Responder:
    """Returns a function that samples batches of responses.

    It takes the number of a batch of training prompts. Each prompt gets one response, by plain
    decoding with the rollout's temperature and truncation. A batch depends only on seed, policy and
    number. Of failed responses only the prompt is returned.
    """
    rows = config.offline.rows
    # The configured number of pages is for batches of training, which have other sizes.
    plain_generator = generator.without_draft().make_variant(prompts=rows, group_size=1, pages=0)
    # Only drafts use earlier answers, and this generator has none.
    generator = dataclasses.replace(plain_generator, past_answers=0)
    stream = load_sets(config, tokenizer, require_answers=False).make_stream(config.seed)
    abstract_batch = abstract_prompts(generator, rows)

    @jax.jit
    def load_weights(policy: Decoder) -> RolloutWeights:
        exported = export_weights(policy, None, generator.dtype, seed=config.seed)
        return generator.load(exported, generator.init_state())

    @partial(jax.jit, out_shardings=meshes.replicated_sharding(generator.mesh))
    def select_texts(rollout: Rollout) -> tuple[Array, Array, Array]:
        # Without response tokens the loss mask is empty, and the row is filtered later.
        lengths = jnp.where(rollout.status == FAILED, rollout.prompt_lengths, rollout.lengths)
        return rollout.tokens, rollout.prompt_lengths, lengths

    weights = load_weights(policy)
    answerer = compile_answerer(generator, weights, abstract_batch)

    def respond(number: int) -> SftBatch:
        problems = [stream[number * rows + row] for row in range(rows)]
        tokens, lengths = pad_prompts(problems, config.data.max_prompt_length, tokenizer.pad_id)
        fields: dict[str, Any] = {
            "tokens": tokens,
            "lengths": lengths,
            "live": np.ones(rows, bool),
            "stream": np.asarray(Stream.OFFLINE, np.int32),
            "batch": np.asarray(number, np.int32),
            "history": np.zeros(abstract_batch.history.shape, np.int32),
            "history_lengths": np.zeros(abstract_batch.history_lengths.shape, np.int32),
        }
        rollout = answerer(weights, put_like(Prompts(**fields), abstract_batch))
        return SftBatch(*jax.device_get(select_texts(rollout)))

    return respond


def read_training_text(
    config: ResolvedConfig, tokenizer: Tokenizer, say: LinePrinter
) -> TextRows | None:
    """Reads the rows of `offline.text`, or generates them if it is `generic`.

    Returns None if the draft is trained on the policy's responses. Reads no more rows of a file
    than training uses. Reports repeated, empty and overlong rows through `say`.

    Raises:
      ConfigError: Some text cannot be used. Names file, line, column and remedy.
    """
    length, offline = config.row_length, config.offline
    rng = stream_rng(config.seed, Stream.CORPUS)
    if offline.text == "generic":
        corpus = dataclasses.replace(config.sft, format="text")
        return rows_from_sft(
            arithmetic.sample_sft_batch(
                config.data, corpus, tokenizer, rng, offline.samples, length
            )
        )
    if not offline.text:
        return None
    file = TextFile(offline.text, tokenizer, bool(config.data.tokenizer), length)
    return TextRows(*file.read_rows(offline.steps * offline.rows, rng, say))


def join_rows(batches: Sequence[TextRows]) -> TextRows:
    """Concatenates the rows of batches."""
    return TextRows(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))


def select_usable_rows(batches: Sequence[TextRows]) -> TextRows:
    """Concatenates batches, and leaves out rows whose loss mask is empty.

    Raises:
      ConfigError: No row is left.
    """
    rows = join_rows(batches)
    # Failed responses have an empty mask. Their non-finite logits would break training too.
    is_usable = np.asarray(rows.mask.any(axis=1))
    message = (
        f"all {len(is_usable)} responses of the policy failed (logits that are not finite), so"
        " there is nothing to train a draft on"
    )
    require(
        bool(is_usable.any()),
        f"{message} or to measure it by; check the policy's weights, or set --model.dtype float32",
    )
    return TextRows(rows.tokens[is_usable], rows.mask[is_usable])


def batch_rows(rows: TextRows, size: int) -> list[TextRows]:
    """Splits rows into batches of `size`, in order.

    The last batch is padded with rows whose loss mask is empty.
    """
    # Padding repeats real rows, as the compiled program needs valid tokens of a fixed shape.
    places = np.arange(-(-len(rows.tokens) // size) * size)
    tokens, mask = (array[places % len(rows.tokens)] for array in rows)
    mask[len(rows.tokens) :] = False
    return [
        TextRows(tokens[first : first + size], mask[first : first + size])
        for first in range(0, len(places), size)
    ]


def select_batch(rows: PyTree, number: int, size: int, seed: int) -> PyTree:
    """Selects a batch of an endless stream.

    Rows are shuffled again in each epoch. The result depends only on the arguments. `rows` may be
    any pytree of arrays with a leading axis of rows.
    """
    count = len(jax.tree.leaves(rows)[0])
    places = np.arange(number * size, (number + 1) * size)
    # A batch may span several epochs, and resuming needs any batch without those before it.
    orders = {
        epoch: stream_rng(seed, Stream.ORDER, epoch).permutation(count)
        for epoch in set((places // count).tolist())
    }
    row_numbers = [orders[place // count][place % count] for place in places.tolist()]
    return jax.tree.map(lambda array: array[row_numbers], rows)


def should_keep_states(config: ResolvedConfig, learner: Learner, rows: TextRows) -> bool:
    """Whether to keep policy states on the host.

    There is one state for each token of `rows`. They are kept if rows are read more than once and
    the states fit in memory.
    """
    rows_read = config.offline.steps * config.offline.rows
    widths = (1 + len(learner.taps)) * config.model.embed
    size = rows.tokens.size * widths * jnp.dtype(config.model.dtype).itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = size <= min(MAX_STATE_BYTES, memory // 4)
    # With several processes, no host has the states of all rows.
    return rows_read > len(rows.tokens) and fits and jax.process_count() == 1


def compute_states(
    learner: Learner, policy: Decoder, rows: TextRows, size: int, progress: Progress
) -> PolicyStates:
    """Runs the policy once over all rows, in batches of `size`, and returns its states."""
    compute = jax.jit(learner.passes.compute_states)
    count, states = len(rows.tokens), None
    for number, batch in enumerate(batch_rows(rows, size)):
        texts = build_text_batch(*batch, learner.mesh, learner.micro_tokens)
        batch_states = jax.device_get(compute(policy, texts))
        # Preallocated: joining a list of batches at the end would take twice the memory.
        if states is None:
            states = jax.tree.map(
                lambda leaf: np.empty((count, *leaf.shape[1:]), leaf.dtype), batch_states
            )
        first = number * size
        for array, batch_array in zip(
            jax.tree.leaves(states), jax.tree.leaves(batch_states), strict=True
        ):
            # The last batch is padded.
            array[first : first + size] = batch_array[: count - first]
        progress.update(min(first + size, count))
    assert states is not None, "there are rows"
    return states


def select_vocabulary(
    rows: TextRows, size: int, vocab: int, stop_ids: tuple[int, ...]
) -> Int32[np.ndarray, " size"]:
    """Selects the vocabulary of a draft.

    It has the end tokens and the most frequent tokens to predict. Among equally frequent tokens,
    those with the lowest ids are selected. Returns `size` of the `vocab` token ids, ascending.
    """
    # Tokens outside are never drafted, so their share limits the acceptance.
    counts = np.bincount(rows.tokens[rows.mask], minlength=vocab)
    # Every response needs an end token, even if few of these rows have one.
    counts[list(stop_ids)] = counts.max() + 1
    # The offsets (d2t) of published EAGLE-3 heads need ascending ids.
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(rows: TextRows, ids: np.ndarray) -> float:
    """Returns the share of the tokens to predict that are in `ids`."""
    return float(np.isin(rows.tokens[rows.mask], ids).mean())
