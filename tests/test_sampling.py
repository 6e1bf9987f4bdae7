"""Processors in their order, against a plain oracle and Hugging Face's."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.sampling import Processing


def oracle(
    logits: np.ndarray,
    processing: Processing,
    produced: int,
    factor: float = 1.0,
    keep: int | None = None,
) -> np.ndarray:
    """The law of one token by plain loops; what is tied with the last token kept stays."""
    logits = np.array(logits, np.float64)
    ends = processing.stop_ids if produced < processing.min_new_tokens else ()
    logits[
        [*processing.banned, *ends, *range(processing.vocab_size or len(logits), len(logits))]
    ] = -np.inf
    temperature = processing.temperature * factor
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / temperature)
    for rule in ("top_k", "top_p", "min_p"):
        probs /= probs.sum()
        order = sorted(range(len(probs)), key=lambda token: -probs[token])
        if rule == "top_k":
            count = processing.top_k or len(probs)
        elif rule == "min_p":
            count = sum(probs >= processing.min_p * max(probs))
        else:
            count = next(
                (n for n in range(1, len(probs)) if sum(probs[order[:n]]) >= processing.top_p),
                len(probs),
            )
        least = probs[order[:count][-1]]
        probs = np.array(
            [
                probability if probability >= least or token == keep else 0
                for token, probability in enumerate(probs)
            ]
        )
    return probs / probs.sum()


PROCESSINGS = {
    "plain": Processing(),
    "cold": Processing(temperature=0.5),
    "hot": Processing(temperature=2.0),
    "greedy": Processing(temperature=0.0, banned=(3,)),
    "bans": Processing(banned=(0, 4)),
    "vocab_size": Processing(vocab_size=4),
    "known, greedy": Processing(temperature=0.0, vocab_size=3),
    "minimum length": Processing(min_new_tokens=3, stop_ids=(1, 5)),
    "top-k": Processing(top_k=3),
    "top-k of more than there are": Processing(top_k=50),
    "top-p": Processing(top_p=0.7),
    "tiny top-p": Processing(top_p=1e-6),
    "min-p": Processing(min_p=0.2),
    "min-p 1": Processing(min_p=1.0),
    "min-p, hot": Processing(min_p=0.3, temperature=3.0, top_k=6, top_p=0.9),
    "all": Processing(
        banned=(2,), min_new_tokens=3, stop_ids=(1, 5), temperature=1.7, top_k=5, top_p=0.8
    ),
    "all known": Processing(
        banned=(2,),
        min_new_tokens=3,
        stop_ids=(1,),
        temperature=1.7,
        top_k=3,
        top_p=0.8,
        vocab_size=6,
    ),
    "all, cold": Processing(
        banned=(2, 6), min_new_tokens=4, stop_ids=(0,), temperature=0.4, top_k=4, top_p=0.95
    ),
}


@pytest.mark.parametrize("factor", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", PROCESSINGS)
def test_processors_follow_their_order(name: str, factor: float) -> None:
    """Rows before and after the minimum length; a factor that is a number, an array, or one of
    several along an axis, traced or not."""
    processing, random = PROCESSINGS[name], np.random.default_rng(0)
    logits = random.normal(size=(40, 2, 8)) * 2
    produced = random.integers(0, 6, (40, 2)).astype(np.int32)
    wanted = np.array(
        [
            [oracle(logits[i, j], processing, int(produced[i, j]), factor) for j in range(2)]
            for i in range(40)
        ]
    )
    given = jnp.asarray(logits, jnp.float32), processing, jnp.asarray(produced)
    traced = jax.jit(sampling.compute_logprobs, static_argnums=1)
    for found in (
        sampling.compute_logprobs(*given, factor),
        sampling.compute_logprobs(*given, jnp.float32(factor)),
        traced(*given, jnp.float32(factor)),
        traced(*given, jnp.array([factor, factor], jnp.float32)),
        jax.nn.log_softmax(sampling.process_logits(*given, factor), axis=-1),
    ):
        np.testing.assert_allclose(np.exp(found), wanted, atol=2e-6)
        np.testing.assert_array_equal(np.asarray(found) == -np.inf, wanted == 0)


def test_each_order_that_is_not_the_documented_one_gives_another_law() -> None:
    """What the test above could not see if its settings commuted."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    none = jnp.int32(0)

    def kept(**settings: Any) -> list[int]:
        logprobs = sampling.compute_logprobs(logits, Processing(**settings), none)
        return np.flatnonzero(np.asarray(logprobs) > -np.inf).tolist()

    assert kept(top_p=0.65) == [0, 1]
    assert kept(top_p=0.65, temperature=3.0) == [0, 1, 2]  # top-p is of the tempered law
    # and of what top-k left: .524, .476
    assert kept(top_p=0.65, top_k=2, temperature=3.0) == [0, 1]
    assert kept(top_p=0.5, top_k=2, temperature=3.0) == [0]
    assert kept(top_p=0.5, temperature=3.0) == [0, 1]
    assert kept(min_p=0.5) == [0, 1, 2]
    assert kept(min_p=0.5, temperature=0.5) == [0, 1]  # so is min-p: .16, .09, .04, .01
    # after top-p, which min-p would leave .44, .33, .22 to reach its sum with
    assert kept(min_p=0.5, top_p=0.75) == [0, 1, 2]
    assert kept(min_p=0.7, top_p=0.6) == [0, 1]
    banned = sampling.compute_logprobs(logits, Processing(banned=(0,), top_k=2), none)
    # what is banned does not use up a place
    np.testing.assert_allclose(np.exp(banned), [0, 0.6, 0.4, 0], atol=1e-6)


def test_factors_along_an_axis_are_each_their_own() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 7)), jnp.float32)
    produced = jnp.zeros((5, 3), jnp.int32)
    factors = jnp.array([0.5, 0.0, 1.0])
    found = sampling.compute_logprobs(logits, Processing(temperature=0.8), produced, factors)
    for depth, factor in enumerate(factors):
        alone = sampling.compute_logprobs(
            logits[:, depth], Processing(temperature=0.8), produced[:, depth], factor
        )
        np.testing.assert_array_equal(found[:, depth], alone)


def test_the_plain_case_costs_nothing() -> None:
    logits, produced = jnp.zeros((2, 5)), jnp.zeros((2,), jnp.int32)
    plain = [
        Processing(),
        Processing(stop_ids=(1,)),
        Processing(min_new_tokens=4),
        *(Processing(top_k=count, vocab_size=count) for count in (5, 9)),
    ]
    for processing in plain:
        assert sampling.process_logits(logits, processing, produced) is logits
        assert not jax.make_jaxpr(
            lambda x, given=processing: sampling.process_logits(x, given, produced)
        )(logits).eqns
    assert sampling.process_logits(logits, Processing(temperature=0.5), produced, 2.0) is logits
    tempered = str(
        jax.make_jaxpr(lambda x: sampling.process_logits(x, Processing(temperature=0.5), produced))(
            logits
        )
    )
    assert tempered.count(" div ") == 1
    assert not any(name in tempered for name in ("sort", "top_k", "argmax", "select"))
    known = jax.make_jaxpr(
        lambda x: sampling.process_logits(x, Processing(vocab_size=3), produced)
    )(logits)
    assert not known.consts, "a vocabulary of 151,936 ids is counted, not stored"


def test_a_traced_factor_that_is_never_zero_needs_no_argmax() -> None:
    """And gives the same numbers; at temperature 0 the argmax stays."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 7)), jnp.float32)
    produced, factor = jnp.zeros((4,), jnp.int32), jnp.float32(0.6)

    def program(temperature: float, may_be_zero: bool) -> Any:
        processing = Processing(temperature=temperature)
        return jax.jit(
            lambda factor: sampling.process_logits(
                logits, processing, produced, factor, may_be_zero=may_be_zero
            )
        )

    for temperature, may_be_zero in itertools.product((0.8, 0.0), (True, False)):
        run = program(temperature, may_be_zero)
        assert ("argmax" in str(jax.make_jaxpr(run)(factor))) == (may_be_zero or not temperature)
        np.testing.assert_array_equal(run(factor), program(temperature, True)(factor))


def test_the_most_likely_token_is_always_kept_and_ties_stay_together() -> None:
    logits = jnp.array([[2.0, 2.0, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    produced = jnp.zeros((2,), jnp.int32)

    def kept(**settings: Any) -> list[list[int]]:
        processed = sampling.process_logits(logits, Processing(**settings), produced)
        return (np.asarray(processed) > -np.inf).astype(int).tolist()

    assert kept(top_p=1e-9) == kept(top_p=0.0) == kept(top_k=1) == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert kept(top_k=2) == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert kept(temperature=0.0) == [[1, 0, 0, 0], [1, 0, 0, 0]]  # the first of two equals


def test_top_p_stops_at_the_token_that_reaches_the_sum() -> None:
    logits, none = jnp.log(jnp.array([0.125, 0.5, 0.25, 0.125])), jnp.int32(0)
    for top_p, count in [(0.499, 1), (0.501, 2), (0.749, 2), (0.751, 4), (0.9999, 4)]:
        assert (
            sampling.process_logits(logits, Processing(top_p=top_p), none) > -jnp.inf
        ).sum() == count


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"top_k": 3, "top_p": 0.3, "temperature": 0.7},
        {"top_k": 5, "min_p": 0.4, "temperature": 0.7},
    ],
)
def test_what_is_known_to_have_been_sampled_is_kept(settings: dict) -> None:
    random = np.random.default_rng(1)
    logits, keep = random.normal(size=(60, 6)), random.integers(0, 6, 60).astype(np.int32)
    produced = jnp.zeros((60,), jnp.int32)
    found = sampling.compute_logprobs(
        jnp.asarray(logits, jnp.float32),
        Processing(**settings),
        produced,
        sampled_ids=jnp.asarray(keep),
    )
    wanted = np.array(
        [
            oracle(row, Processing(**settings), 0, keep=token)
            for row, token in zip(logits, keep, strict=True)
        ]
    )
    np.testing.assert_allclose(np.exp(found), wanted, atol=2e-6)
    assert np.isfinite(np.asarray(found)[np.arange(60), keep]).all()


@pytest.mark.parametrize("name", PROCESSINGS)
def test_nan_logits_are_not_hidden(name: str) -> None:
    last = (PROCESSINGS[name].vocab_size or 8) - 1
    logits = (
        jnp.array(
            [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]
        )
        .at[0, last]
        .set(jnp.nan)
    )
    found = np.asarray(
        sampling.compute_logprobs(logits, PROCESSINGS[name], jnp.zeros((2,), jnp.int32))
    )
    assert np.isnan(found[0]).any()
    assert not np.isnan(found[1]).any()
    assert np.isnan(sampling.entropy(jnp.asarray(found))).tolist() == [True, False]


def test_gradients_pass_the_processors() -> None:
    """Finite, and those of a plain softmax over what is left."""
    logits = jnp.asarray(np.random.default_rng(2).normal(size=8), jnp.float32)
    processing = PROCESSINGS["all"]
    left = oracle(np.asarray(logits), processing, 0)
    chosen = int(left.argmax())
    gradient = jax.grad(lambda x: sampling.compute_logprobs(x, processing, jnp.int32(0))[chosen])(
        logits
    )
    np.testing.assert_allclose(
        gradient, ((np.arange(8) == chosen) - left) / processing.temperature, atol=1e-6
    )


def test_entropy_counts_only_what_is_possible() -> None:
    law = np.array(
        [[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.2, 0.0]]
    )
    with np.errstate(divide="ignore"):
        logprobs = jnp.asarray(np.log(law), jnp.float32)
    wanted = [-sum(chance * np.log(chance) for chance in row if chance > 0) for row in law]
    np.testing.assert_allclose(sampling.entropy(logprobs), wanted, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: sampling.entropy(x).sum())(logprobs)).all()


@pytest.mark.hf
@pytest.mark.parametrize("name", [name for name in PROCESSINGS if "greedy" not in name])
def test_processors_agree_with_hugging_face(name: str) -> None:
    transformers = pytest.importorskip("transformers.generation.logits_process")
    torch = pytest.importorskip("torch")
    processing, prompt = PROCESSINGS[name], 3
    logits = np.random.default_rng(4).normal(size=(200, 8)).astype(np.float32) * 2
    for produced in (0, 2, 3, 5):
        chain = []
        never = [*processing.banned, *range(processing.vocab_size or 8, 8)]
        if never:
            chain.append(transformers.SuppressTokensLogitsProcessor(never))
        if processing.min_new_tokens:
            chain.append(
                transformers.MinNewTokensLengthLogitsProcessor(
                    prompt, processing.min_new_tokens, list(processing.stop_ids)
                )
            )
        chain.append(transformers.TemperatureLogitsWarper(processing.temperature))
        if processing.top_k:
            chain.append(transformers.TopKLogitsWarper(processing.top_k))
        chain.append(transformers.TopPLogitsWarper(processing.top_p))
        if processing.min_p:
            chain.append(transformers.MinPLogitsWarper(processing.min_p))
        scores = transformers.LogitsProcessorList(chain)(
            torch.zeros((200, prompt + produced), dtype=torch.long), torch.tensor(logits)
        )
        found = sampling.compute_logprobs(
            jnp.asarray(logits), processing, jnp.full((200,), produced, jnp.int32)
        )
        np.testing.assert_allclose(np.exp(found), torch.softmax(scores, -1).numpy(), atol=2e-6)
