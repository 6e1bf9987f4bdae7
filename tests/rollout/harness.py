"""What the tests of the engine share: compiled loops over tiny networks, drafts that are right by
construction, exact laws in numpy."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN as PLAIN_DRAFT
from jaxspec.drafts.base import Committed, Context, Draft, DrawnProposal, Sampler
from jaxspec.drafts.lookup.drafting import history_draft, ngram_draft, prefer_lookup
from jaxspec.drafts.model.drafting import model_draft
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import with_vocabulary
from jaxspec.models.mtp import Mtp
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.generate import generate_sharded
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Block, Verification
from jaxspec.rollout.verification.fused import FUSED
from jaxspec.rollout.verification.modes import Matching, PointMatching, Rejection
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.rollout.verification.plain import make_distributions as plain_distributions
from jaxspec.rollout.verify import Distributions, Verdict, block_rule, match_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import Drafter, LengthChooser, NoChooser, Prompts, Rollout
from tests.conftest import (
    eagle3,
    no_history,
    small_mesh,
    tiny_model,
    tiny_network,
    tiny_prompts,
    with_weights,
)
from tests.twins import numpy_softmax

GROUP, WIDTH, NEW, PAST = 4, 5, 8, 2
STOP = (1, 3)
SPREAD = Processing(stop_ids=STOP, temperature=0.9, vocab_size=10)
BELOW_ONE = np.nextafter(1.0, 0.0)
FORMS: dict[str, Verification] = {"plain": PLAIN, "fused": FUSED, "fused by ids": FUSED}
"""Forms of verification; of one, all of the draft's tokens are mapped to the target's."""


class InUse:
    """The form that rules have until another is chosen (fixture `form`)."""

    form = "plain"


def distributions(target: jax.Array, draft: jax.Array, form: str) -> Distributions:
    """Those of log-probabilities [B K1 V] and [B K V], in a form."""
    if form == "plain":
        return plain_distributions(target, draft)
    rows, positions, vocab = target.shape
    ids = jnp.arange(vocab, dtype=jnp.int32) if form == "fused by ids" else None
    tokens = jnp.zeros((rows, positions - 1), jnp.int32)
    produced = jnp.zeros((rows, positions), jnp.int32)
    proposal = DrawnProposal(tokens, draft, jnp.zeros((rows,), jnp.int32), ids)
    block = Block(target, proposal, produced, Processing(), 1.0, (1.0,), slice(None))
    return FORMS[form].compare_block(block).distributions


def in_form(rule: Callable[..., Verdict]) -> Callable[..., Verdict]:
    """A rule of distributions as one of log-probabilities, in the form in use."""

    @functools.partial(jax.jit, static_argnames="form")
    def verify(target: jax.Array, draft: jax.Array, *arguments: jax.Array, form: str) -> Verdict:
        return rule(distributions(target, draft, form), *arguments)

    @functools.wraps(rule)
    def call(*arguments: Any) -> Verdict:
        return verify(*jax.tree.map(jnp.asarray, arguments), form=InUse.form)

    return call


def mode_of(rule: Callable[..., Verdict] | None) -> Matching | Rejection:
    """The mode with this rule; None: coupled."""
    return Rejection(rule) if rule else Matching()


RULES = {"token": in_form(token_rule), "block": in_form(block_rule)}


@functools.partial(jax.jit, static_argnames="form")
def _match(target: jax.Array, *arguments: jax.Array, form: str) -> Verdict:
    # The rule does not read the draft's.
    return match_rule(distributions(target, target[:, :-1], form), *arguments)


def match(*arguments: Any) -> Verdict:
    """The rule of matching, in the form in use."""
    return _match(*jax.tree.map(jnp.asarray, arguments), form=InUse.form)


def marked(cases: Iterable[Any]) -> list[Any]:
    """Cases as pytest's parameters, each with the mark that it names."""
    return [
        pytest.param(case, marks=getattr(pytest.mark, case.mark) if case.mark else [], id=str(case))
        for case in cases
    ]


def by_form(plain: Iterable[tuple[Any, ...]], every: tuple[Any, ...]) -> list[Any]:
    """A form of verification and a case, as pytest's parameters: the plain form has all cases, the
    fast one has one, as each takes it seconds to compile."""
    fast = pytest.param("fused by ids", *every, marks=pytest.mark.slow)
    return [*(("plain", *case) for case in (*plain, every)), fast]


def log(probabilities: np.ndarray) -> np.ndarray:
    """Of 0 it is -inf, silently."""
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def draft_of(kind: str, length: int) -> Draft:
    """A draft by name; `a+b` prefers the look-up b to the learned a."""
    learned, _, beside = kind.partition("+")
    if beside:
        return prefer_lookup(draft_of(beside, length), draft_of(learned, length))
    match kind:
        case "none":
            return PLAIN_DRAFT
        case "eagle3 other":
            return recurrent_draft(length, (0, 4))
        case "eagle3" | "eagle3 small":
            return recurrent_draft(length, (1, 2, 3))
        case "mtp" | "mtp reversed" | "eagle1":
            return recurrent_draft(length)
        case "mtp 2":
            return recurrent_draft(length, depth=2)
        case "model":
            return model_draft(length)
        case "history":
            return history_draft(length, GROUP, 1, 4)
        case rule:
            return ngram_draft(length, rule, 1, 3, STOP)  # pyright: ignore[reportArgumentType]


def network_of(kind: str, scale: float, **changes: Any) -> Any:
    """The weights that go with `draft_of`."""
    model = tiny_model(**changes)
    match kind.partition("+")[0]:
        case "eagle3":
            return tiny_network(eagle3, model, 3, scale)
        case "eagle3 other":
            form = {
                "taps": (0, 4),
                "fuse_norms": True,
                "norm_before_residual": True,
                "norm_output": True,
                "own_embedding": True,
            }
            sizes = {"layers": 2, "embed": 8, "heads": 2, "kv_heads": 1, "head_size": 6, "ffn": 12}
            return tiny_network(functools.partial(eagle3, sizes=sizes, **form), model, 2, scale)
        case "eagle1":
            return tiny_network(functools.partial(eagle3, use_taps=False), model, 2, scale)
        case "eagle3 small":
            small = tiny_network(functools.partial(eagle3, vocab=4), model, 2, scale)
            return with_vocabulary(small, np.array([0, 1, 3, 4]))
        case "mtp":
            return tiny_network(Mtp, model, 2, scale)
        case "mtp reversed":
            return tiny_network(functools.partial(Mtp, embedding_first=False), model, 2, scale)
        case "mtp 2":
            return tiny_network(functools.partial(Mtp, layers=2), model, 2, scale)
        case "model":
            return tiny_network(Decoder, tiny_model(**changes, embed=8, ffn=8), 2, scale)
        case _:
            return None


def changing_chooser(lengths: tuple[int, ...]) -> LengthChooser | NoChooser:
    """By which rounds of all slots draft nothing, after two that try one token; those of the tail
    draft most. Without lengths all draft alike."""
    if not lengths:
        return NoChooser()
    chooser = length_chooser.init_chooser(lengths, WIDTH + NEW)
    falling, rising = np.linspace(9.0, 1.0, len(lengths)), np.linspace(1.0, 9.0, len(lengths))
    first = np.arange(chooser.round_cost.shape[1])[:, None] == 0
    cost = np.where(first, rising[:, None, None], falling[:, None, None])
    return chooser.replace(
        round_cost=jnp.asarray(cost, jnp.float32),
        acceptance=chooser.acceptance.replace(
            seconds_to_lose=jnp.float32(2 * (rising[1] - rising[0]))
        ),
    )


def drafter(
    network: Any, draft: Draft, choice: tuple[int, ...] = (), lengths: tuple[int, ...] = ()
) -> Drafter:
    """The draft as the engine takes it, at the only temperature there is, or at the chosen ones of
    the grid."""
    length = draft.max_length
    choice = choice or (0,) * length
    return Drafter(
        network=network,
        factor_index=jnp.asarray(choice, jnp.int32).reshape(length),
        chooser=changing_chooser(lengths),
    )


def fitted(settings: Settings, draft: Draft) -> Settings:
    """With the mode of this draft, as a generator has it."""
    mode = settings.mode
    assert not isinstance(mode, PointMatching), "it is fitted once"
    return settings._replace(mode=mode.for_draft(draft, settings.grid))


def compiled(
    draft: Draft,
    chosen: Settings,
    data: int = 1,
    tensor: int = 1,
    choice: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    expert: int = 1,
) -> Callable[..., Any]:
    """Prompts in, numpy rollout out; `options` are the compiler's."""
    mesh, chosen = small_mesh(data, tensor, expert), fitted(chosen, draft)
    run = jax.jit(
        lambda target, drafter, prompts, key: generate_sharded(
            target, drafter, draft, prompts, key, chosen, mesh
        ),
        compiler_options=options,
    )

    def call(pair: tuple[Decoder, Any], prompts: Prompts, seed: int = 5) -> Any:
        return jax.tree.map(
            np.asarray,
            run(
                pair[0],
                drafter(pair[1], draft, choice, chosen.lengths),
                prompts,
                jax.random.key(seed),
            ),
        )

    return call


def assert_same_rows(
    found: Rollout, wanted: Rollout, rows: Any = slice(None), of: Any = None
) -> None:
    of = rows if of is None else of
    for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(
            getattr(found, name)[rows], getattr(wanted, name)[of], err_msg=name
        )
    np.testing.assert_allclose(found.logprobs[rows], wanted.logprobs[of], rtol=0, atol=1e-9)


def numpy_processed(logits: np.ndarray, processing: Processing, produced: int) -> np.ndarray:
    """Probabilities of one position: known ids, bans, minimum length, temperature, top-k, top-p,
    min-p, one after the other."""
    logits = logits.copy()
    logits[processing.vocab_size or len(logits) :] = -np.inf
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
        before, probabilities[token] = (
            before + probabilities[token],
            probabilities[token] * (before < processing.top_p),
        )
    probabilities[probabilities < processing.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def bigram_draft(length: int, table: np.ndarray) -> Draft:
    """A draft that needs only the last token: row v of `table` holds the logits of what follows
    v."""
    logits = jnp.asarray(table)

    def propose(
        network: Any,
        target: Decoder,
        state: tuple[()],
        cache: None,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[tuple[()], None, DrawnProposal]:
        token, drafted, seen = context.tokens_at(context.lengths[:, None] - 1)[:, 0], [], []
        for offset in range(length):
            seen.append(logits[token])
            token = sample(seen[-1], offset)
            drafted.append(token)
        return (
            state,
            None,
            DrawnProposal(jnp.stack(drafted, 1), jnp.stack(seen, 1), jnp.full_like(token, length)),
        )

    def catch_up(
        network: Any, target: Decoder, state: tuple[()], cache: None, context: Context
    ) -> tuple[tuple[()], None]:
        return state, None

    def commit(state: tuple[()], kept: Committed) -> tuple[()]:
        return state

    return Draft(
        max_length=length,
        taps=(),
        is_stochastic=True,
        empty_cache=lambda network, rows, slots: None,
        init_state=lambda network, target, prompts: (),
        prefill=lambda network, target, state, cache, pieces, features: (state, cache),
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def bigram_target(head: np.ndarray, dtype: str = "float64") -> tuple[Decoder, np.ndarray]:
    """A decoder that sees only the last token, and its logits by last token."""
    vocab = head.shape[1]
    model = tiny_model(
        vocab=vocab, embed=vocab, layers=1, heads=1, kv_heads=1, head_size=2, ffn=2, dtype=dtype
    )
    target = tiny_network(Decoder, model, 3)
    target = with_weights(
        target, output=0.0, down=0.0, embedding=np.eye(vocab), norm=1.0, head=head
    )
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


def coupled_prompts() -> Prompts:
    """Prompts of 1 to 5 tokens over a small part of the vocabulary, so that look-up has something
    to find, with earlier texts."""
    random = np.random.default_rng(4)
    made = tiny_prompts(8, WIDTH)
    tokens = jnp.asarray(random.integers(4, 7, (8, WIDTH)), jnp.int32)
    texts = jnp.asarray(random.integers(4, 7, (8, PAST, WIDTH + NEW)), jnp.int32)
    lengths = jnp.asarray(random.integers(0, WIDTH + NEW + 1, (8, PAST)), jnp.int32)
    return made.replace(
        tokens=tokens, lengths=made.lengths.at[3].set(1), history=texts, history_lengths=lengths
    )


@functools.cache
def plain() -> tuple[Decoder, Any]:
    """A target, and what it answers to `coupled_prompts` by plain decoding."""
    target = tiny_network(Decoder, tiny_model(), 1, 0.8)
    return target, compiled(PLAIN_DRAFT, Settings(GROUP, NEW, SPREAD, Matching()))(
        (target, None), coupled_prompts()
    )
