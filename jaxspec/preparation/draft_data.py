"""What a draft is trained on: the policy's own responses or a text, in batches of an order of its
own, and the vocabulary they call for."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32

from jaxspec import mesh as meshes
from jaxspec.config.settings import OfflineConfig, ResolvedConfig
from jaxspec.data import arithmetic
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.problems import load_sets, pad_prompts
from jaxspec.data.texts import TextFile
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_prompts, put_like
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream, stream_rng
from jaxspec.models.decoder import Decoder
from jaxspec.rl.train_batch import PolicyStates, build_text_batch
from jaxspec.state import FAILED, Prompts, PyTree
from jaxspec.system.progress import Progress
from jaxspec.tokens.tokenizer import Tokenizer

HELD_OUT_INTERVAL = 16
"""One batch of samples in so many is never trained on."""
MAX_STATE_BYTES = 4 << 30
"""Bytes that the policy's states may take, if that is no more than a quarter of the memory."""


class TextRows(NamedTuple):
    """Sequences that a draft is trained on or measured by."""

    tokens: Int32[np.ndarray, "rows length"]
    mask: Bool[np.ndarray, "rows length"]
    """True at the tokens to predict: responses, what the assistant wrote in a chat, or all of a
    text."""


def rows_from_sft(batch: SftBatch) -> TextRows:
    """Prompts with their responses, of which the latter are to be predicted."""
    positions = np.arange(batch.tokens.shape[1])
    return TextRows(
        batch.tokens,
        (positions >= batch.prompt_lengths[:, None]) & (positions < batch.lengths[:, None]),
    )


def hold_out_batches(offline: OfflineConfig) -> tuple[range, range]:
    """Numbers of the batches of samples to train on, and of those held out: the last ones, at least
    one."""
    count = -(-offline.samples // offline.rows)
    first = count - max(1, count // HELD_OUT_INTERVAL)
    return range(first), range(first, count)


def make_responder(job: Job, policy: Decoder) -> Callable[[int], SftBatch]:
    """Returns what answers batch number n of the training prompts, once each, under the rollout's
    own processing.

    Decoding is plain. A batch depends on the seed, the policy and its number alone. A response that
    failed is given as an empty one.
    """
    config, rows = job.config, job.config.offline.rows
    # those of the config are for other prompts
    plain_generator = job.step.generator.plain().with_(prompts=rows, group_size=1, pages=0)
    generator = dataclasses.replace(plain_generator, past=0)
    stream = load_sets(config, job.tokenizer, require_answers=False).make_stream(config.seed)
    abstract_batch = abstract_prompts(generator, rows)

    @partial(jax.jit, out_shardings=meshes.replicated_sharding(job.mesh))
    def generate(policy: Decoder, prompts: Prompts) -> PyTree:
        rollout = generator.generate(generator.sync(policy, None, generator.start()), prompts)
        lengths = jnp.where(rollout.status == FAILED, rollout.prompt_lengths, rollout.lengths)
        return rollout.tokens, rollout.prompt_lengths, lengths

    def respond(number: int) -> SftBatch:
        problems = [stream[number * rows + row] for row in range(rows)]
        tokens, lengths = pad_prompts(problems, config.data.max_prompt_length, job.tokenizer.pad_id)
        fields: dict[str, Any] = {
            "tokens": tokens,
            "lengths": lengths,
            "live": np.ones(rows, bool),
            "stream": np.asarray(Stream.OFFLINE, np.int32),
            "batch": np.asarray(number, np.int32),
            "history": np.zeros(abstract_batch.history.shape, np.int32),
            "history_lengths": np.zeros(abstract_batch.history_lengths.shape, np.int32),
        }
        return SftBatch(
            *jax.device_get(generate(policy, put_like(Prompts(**fields), abstract_batch)))
        )

    return respond


def read_training_text(
    config: ResolvedConfig, tokenizer: Tokenizer, say: Callable[[str], Any]
) -> TextRows | None:
    """The rows of `offline.text`, of a file no more than the updates take; None where the policy's
    own responses are trained on. `say` is told what a file repeats, leaves empty, or has too long.

    Raises:
      ConfigError: names file, line and column of what cannot be used, and a remedy.
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
    """All rows of some batches."""
    return TextRows(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))


def select_usable_rows(batches: Sequence[TextRows]) -> TextRows:
    """All rows of some batches but those with nothing to predict: what made a response fail would
    fail the learner's pass as well.

    Raises:
      ConfigError: nothing is left.
    """
    rows = join_rows(batches)
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
    """Rows in order, in batches of `size`; the last is filled up with rows of which nothing is to
    be predicted."""
    places = np.arange(-(-len(rows.tokens) // size) * size)
    tokens, mask = (array[places % len(rows.tokens)] for array in rows)
    mask[len(rows.tokens) :] = False
    return [
        TextRows(tokens[first : first + size], mask[first : first + size])
        for first in range(0, len(places), size)
    ]


def select_batch(rows: PyTree, number: int, size: int, seed: int) -> PyTree:
    """Batch `number` of an endless stream of `rows`, which are shuffled anew each epoch.

    It depends on nothing but the arguments. Rows may be any tree of arrays [rows ...].
    """
    count = len(jax.tree.leaves(rows)[0])
    places = np.arange(number * size, (number + 1) * size)
    orders = {
        epoch: stream_rng(seed, Stream.ORDER, epoch).permutation(count)
        for epoch in set((places // count).tolist())
    }
    row_numbers = [orders[place // count][place % count] for place in places.tolist()]
    return jax.tree.map(lambda array: array[row_numbers], rows)


def should_keep_states(job: Job, rows: TextRows) -> bool:
    """Whether the policy's states at all tokens of `rows` are to be kept: updates need them again,
    and this machine has room for them."""
    config = job.config
    rows_read = config.offline.steps * config.offline.rows
    widths = (1 + len(job.step.learner.taps)) * config.model.embed
    size = rows.tokens.size * widths * jnp.dtype(config.model.dtype).itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = size <= min(MAX_STATE_BYTES, memory // 4)
    return rows_read > len(rows.tokens) and fits and jax.process_count() == 1


def compute_states(
    job: Job, policy: Decoder, rows: TextRows, micro_tokens: int, progress: Progress
) -> PolicyStates:
    """Runs the policy once over all `rows`, in micro-batches of `micro_tokens` positions a data
    shard."""
    learner, size = (
        job.step.learner.for_supervised_texts(None, micro_tokens=micro_tokens),
        job.config.offline.rows,
    )
    compute = jax.jit(learner.passes.compute_states)
    count, states = len(rows.tokens), None
    for number, batch in enumerate(batch_rows(rows, size)):
        batch_states = jax.device_get(
            compute(policy, build_text_batch(*batch, job.mesh, micro_tokens))
        )
        if states is None:  # in place, since they may fill half of the memory
            states = jax.tree.map(
                lambda leaf: np.empty((count, *leaf.shape[1:]), leaf.dtype), batch_states
            )
        first = number * size
        for array, batch_array in zip(
            jax.tree.leaves(states), jax.tree.leaves(batch_states), strict=True
        ):
            # the last batch was filled up
            array[first : first + size] = batch_array[: count - first]
        progress.update(min(first + size, count))
    assert states is not None, "there are rows"
    return states


def select_vocabulary(
    rows: TextRows, size: int, vocab: int, stop_ids: tuple[int, ...]
) -> Int32[np.ndarray, " size"]:
    """The end tokens and the most frequent tokens to predict of `rows`, `size` of the `vocab` in
    all, ascending; lowest ids fill up.

    Tokens outside are never drafted, so the share that these cover bounds the acceptance; ascending
    ids are what the offsets (d2t) of published EAGLE-3 heads need.
    """
    counts = np.bincount(rows.tokens[rows.mask], minlength=vocab)
    counts[list(stop_ids)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(rows: TextRows, ids: np.ndarray) -> float:
    """Share of the tokens to predict of `rows` that are among `ids`."""
    return float(np.isin(rows.tokens[rows.mask], ids).mean())
