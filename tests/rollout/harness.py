"""What the tests of the engine share: compiled loops over tiny networks, drafts that are right by construction, exact laws in numpy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.generate import Settings, generate
from jaxspec.sampling import Processing
from jaxspec.state import Drafter, Prompts, Rollout
from tests.conftest import no_history, numpy_decoder, numpy_softmax, small_mesh, tiny_model, tiny_network, with_weights


def drafter(network: Any, draft: Draft | None, choice: tuple[int, ...] = ()) -> Drafter:
    """The draft as the engine takes it, at the only temperature there is, or at the chosen ones of the grid."""
    length = draft.length if draft else 0
    return Drafter(network=network, choice=jnp.asarray(choice or (0,) * length, jnp.int32).reshape(length))


def compiled(draft: Draft | None, chosen: Settings, data: int = 1, tensor: int = 1, choice: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Prompts in, numpy rollout out."""
    mesh = small_mesh(data, tensor)
    run = jax.jit(lambda target, drafter, prompts, key: generate(target, drafter, draft, prompts, key, chosen, mesh))

    def call(pair: tuple[Decoder, Any], prompts: Prompts, seed: int = 5) -> Any:
        return jax.tree.map(np.asarray, run(pair[0], drafter(pair[1], draft, choice), prompts, jax.random.key(seed)))

    return call


def assert_same_rows(found: Rollout, wanted: Rollout, rows: Any = slice(None), of: Any = None) -> None:
    of = rows if of is None else of
    for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(getattr(found, name)[rows], getattr(wanted, name)[of], err_msg=name)
    np.testing.assert_allclose(found.logprobs[rows], wanted.logprobs[of], rtol=0, atol=1e-9)


def numpy_processed(logits: np.ndarray, processing: Processing, produced: int) -> np.ndarray:
    """Probabilities of one position: bans, minimum length, temperature, top-k, top-p, one after the other."""
    logits = logits.copy()
    logits[list(processing.banned)] = -np.inf
    if produced < processing.min_new_tokens:
        logits[list(processing.stop_ids)] = -np.inf
    if processing.temperature == 0:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    likely = np.argsort(-logits)
    if processing.top_k:
        logits[likely[processing.top_k :]] = -np.inf
    probabilities = numpy_softmax(logits / processing.temperature)
    before = 0.0
    for token in likely:
        before, probabilities[token] = before + probabilities[token], probabilities[token] * (before < processing.top_p)
    return probabilities / probabilities.sum()


def sequence_law(target: Decoder, prompt: list[int], processing: Processing, new: int) -> dict[tuple[int, ...], float]:
    """Every possible response and its probability, by plain decoding in numpy."""
    law, open_prefixes = {}, {(): 1.0}
    for _ in range(new):
        longer = {}
        for prefix, mass in open_prefixes.items():
            probabilities = numpy_processed(numpy_decoder(target, [*prompt, *prefix])[0][-1], processing, len(prefix))
            for token in np.flatnonzero(probabilities).tolist():
                (law if token in processing.stop_ids else longer)[*prefix, token] = mass * probabilities[token]
        open_prefixes = longer
    return law | open_prefixes


def bigram_draft(length: int, table: np.ndarray) -> Draft:
    """A draft that needs only the last token: row v of `table` holds the logits of what follows v."""
    logits = jnp.asarray(table)

    def prefill(network: Any, target: Decoder, prompts: Prompts, features: jax.Array, slots: int) -> tuple[()]:
        return ()

    def propose(network: Any, target: Decoder, state: tuple[()], context: Context, sample: Sampler) -> tuple[tuple[()], Proposal]:
        token, drafted, seen = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0], [], []
        for offset in range(length):
            seen.append(logits[token])
            token = sample(seen[-1], offset)
            drafted.append(token)
        return state, Proposal(jnp.stack(drafted, 1), jnp.stack(seen, 1), jnp.full_like(token, length))

    def commit(state: tuple[()], kept: Kept) -> tuple[()]:
        return state

    return Draft(length, False, True, prefill, lambda state, times: state, propose, commit)


def bigram_target(head: np.ndarray) -> tuple[Decoder, np.ndarray]:
    """A decoder that sees only the last token, and its logits by last token."""
    vocab = head.shape[1]
    target = tiny_network(Decoder, tiny_model(vocab=vocab, embed=vocab), 3)
    target = with_weights(target, output=0.0, down=0.0, embedding=np.eye(vocab), norm=1.0, head=head)
    return target, np.sqrt(vocab) / np.sqrt(1 + vocab * 1e-6) * head


def last_token_prompts(tokens: list[int]) -> Prompts:
    count = len(tokens)
    return Prompts(
        tokens=jnp.array([[0, token] for token in tokens], jnp.int32),
        lengths=jnp.full((count,), 2, jnp.int32),
        live=jnp.ones(count, bool),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
        **no_history(count),
    )
