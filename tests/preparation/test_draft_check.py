"""The acceptance probe on drafts that were trained to agree, and on the same weights wired wrongly:
each mistake is named."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.kinds import get_learned
from jaxspec.drafts.unroll import UNROLL
from jaxspec.inputs.spec import HeadSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import with_vocabulary
from jaxspec.models.mtp import Mtp
from jaxspec.preparation.draft_check import (
    POOR_AGREEMENT,
    DraftCheck,
    describe_check,
    measure_agreement,
)
from jaxspec.rl import optimizers
from jaxspec.rl.draft_objective import DraftObjective, compute_draft_loss, cross_entropy
from jaxspec.rl.train_batch import rows_to_pack
from jaxspec.rollout.generator import Generator
from tests.conftest import (
    eagle3,
    small_mesh,
    tiny_config,
    tiny_model,
    tiny_network,
    value_and_grad,
    with_weights,
)
from tests.twins import numpy_decoder, numpy_eagle_slot, numpy_softmax, numpy_weights

MODEL = tiny_model(layers=8, vocab=24, dtype="float32", head_size=8, rope_theta=3.0)
TAPS, IDS = (2, 4, 5), np.array([0, 1, 2, 4, 6, 7, 9, 10, 11, 12, 13])
ROWS, SIZE = 16, 24
TOKENS = np.random.default_rng(0).integers(0, 3, (ROWS, SIZE)).astype(np.int32)
LENGTHS = np.full(ROWS, SIZE)
LENGTHS[:3] = 9


@functools.cache
def policy() -> Decoder:
    """Its likeliest tokens are some of `IDS`; the texts have few tokens, so that it matters what
    went before."""
    made = tiny_network(Decoder, MODEL, 1, 2.5)
    return with_weights(made, head=np.asarray(made.head[...]) * 3 * np.isin(np.arange(24), IDS))


def trained(network: Any, taps: tuple[int, ...], updates: int) -> Any:
    """The network after some updates on the very texts that it is probed on."""
    texts = rows_to_pack(jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))
    forward = jax.jit(lambda target: target(texts.tokens, texts.positions, taps=taps))(policy())
    objective = DraftObjective(cross_entropy, 2, 1.0, 1.0, UNROLL)
    optimizer = optimizers.adamw(8e-3, 1.0)

    def update(_: Any, learner: Any) -> Any:
        loss, slope = value_and_grad(
            lambda made: compute_draft_loss(made, policy(), forward, texts, objective).loss,
            learner.network,
        )
        return optimizers.apply_update(learner, slope, loss, optimizer)[0]

    return jax.jit(lambda learner: jax.lax.fori_loop(0, updates, update, learner))(
        optimizers.init_state(network, optimizer)
    ).network


def fresh(seed: int) -> Any:
    return with_vocabulary(
        tiny_network(functools.partial(eagle3, vocab=len(IDS)), MODEL, seed), IDS
    )


@functools.cache
def head() -> Any:
    return trained(fresh(2), TAPS, 400)


@functools.cache
def layer() -> Any:
    return trained(tiny_network(Mtp, MODEL, 2), (), 300)


def generator_for(kind: str, taps: tuple[int, ...] = ()) -> Generator:
    draft = DraftConfig(kind=kind, draft_length=2, eagle3=Eagle3Config(vocab=len(IDS)))  # pyright: ignore[reportArgumentType]
    return build_step(
        tiny_config(MODEL, draft, head=HeadSpec(taps=taps)), small_mesh(), (1,), 0
    ).generator


def rewired(network: Any, **settings: Any) -> Any:
    other = jax.tree.map(lambda leaf: leaf, network)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


@pytest.mark.slow
def test_a_trained_head_agrees_and_nothing_is_tried() -> None:
    """The numbers of depth 1 against numpy: how often both likeliest tokens are the same, and the
    overlap of the laws."""
    reading = measure_agreement(
        generator_for("eagle3"), get_learned("eagle3"), policy(), head(), TOKENS, LENGTHS
    )
    assert min(reading.agreement) > 0.9
    assert reading.tokens == (LENGTHS - 2).sum()
    assert reading.warning == ""
    row, same, overlap = 3, [], []
    logits, _, stream = numpy_decoder(policy(), TOKENS[row])
    embedding, seen = numpy_weights(policy())["embedding"], []
    for t in range(SIZE - 2):
        hidden = np.concatenate([stream[tap][t] for tap in TAPS]) @ numpy_weights(head())["fuse"]
        drafted = numpy_softmax(
            numpy_eagle_slot(head(), hidden, embedding[TOKENS[row, t + 1]], t, seen)[1]
        )
        law = numpy_softmax(logits[t + 1])
        same.append(IDS[drafted.argmax()] == law.argmax())
        overlap.append(np.minimum(drafted, law[IDS]).sum())
    alone = measure_agreement(
        generator_for("eagle3"),
        get_learned("eagle3"),
        policy(),
        head(),
        TOKENS[row : row + 1],
        np.array([SIZE]),
    )
    assert (alone.agreement[0], alone.tokens) == (pytest.approx(np.mean(same), abs=1e-6), SIZE - 2)
    assert alone.acceptance[0] == pytest.approx(np.mean(overlap), abs=1e-5)


def test_the_report_is_one_line_with_every_number() -> None:
    said = describe_check(DraftCheck([0.71, 0.6], [0.5, 0.25], 320))
    assert (
        said == "the draft's likeliest token is the policy's in 71%, 60% of 320 prompt tokens (by"
        " depth); expected acceptance 0.50, 0.25, hence 1.62 tokens a round"
    )
    assert "could not be compared" in describe_check(DraftCheck([0.0], [0.0], 0))


MISTAKES: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "layers before": (
        head,
        (1, 3, 4),
        r"later, after 2, 4, 5: set --head.taps 2 4 5",
    ),
    "layers after": (head, (3, 5, 6), r"one layer earlier, after 2, 4, 5: set --head.taps 2 4 5"),
    "residual": (
        lambda: rewired(head(), form=dataclasses.replace(head().form, norm_before_residual=True)),
        (),
        (
            r'at depth 1, but in 9\d% if norm_before_residual is False: set "norm_before_residual":'
            r" false in the draft\'s config.json"
        ),
    ),
    "recurrence": (
        lambda: rewired(head(), form=dataclasses.replace(head().form, norm_output=True)),
        (),
        r"at depth 2, but in 9\d% if norm_output is False",
    ),
    "positions": (
        lambda: rewired(head(), config=dataclasses.replace(head().config, rope_theta=1e6)),
        (),
        r'if rope_theta is the policy\'s 3: set "rope_theta": 3 in',
    ),
    "vocabulary": (
        lambda: with_vocabulary(head(), IDS + np.arange(len(IDS))),
        (),
        r"if its d2t holds token ids, not offsets",
    ),
    "order": (
        lambda: rewired(layer(), embedding_first=False),
        (),
        r"if its layers read \[embedding, hidden\]: set DeepSeek's names for its tensors",
    ),
    "weights": (
        lambda: fresh(3),
        (),
        r"none of these mends it: .*Most likely it was trained for other weights",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "layers before" else pytest.mark.sweep)
        for name in MISTAKES
    ],
)
def test_each_mistake_is_named_with_what_mends_it(name: str) -> None:
    network, taps, said = MISTAKES[name]
    kind = "mtp" if name == "order" else "eagle3"
    reading = measure_agreement(
        generator_for(kind, taps),
        get_learned(kind),
        policy(),
        network(),
        TOKENS,
        LENGTHS,
    )
    assert re.search(said, reading.warning), reading


@pytest.mark.slow
def test_trained_layers_agree() -> None:
    reading = measure_agreement(
        generator_for("mtp"), get_learned("mtp"), policy(), layer(), TOKENS, LENGTHS
    )
    assert min(reading.agreement) > 0.9
    assert reading.warning == ""


def test_a_few_tokens_are_not_judged() -> None:
    reading = measure_agreement(
        generator_for("eagle3"),
        get_learned("eagle3"),
        policy(),
        fresh(3),
        TOKENS[:1],
        np.array([SIZE]),
    )
    assert reading.agreement[0] < POOR_AGREEMENT
    assert reading.warning == ""


def test_what_is_tried() -> None:
    """One thing at a time, and nothing that is as it was, outside the policy's layers, or no
    vocabulary at all."""
    tried = list(get_learned("eagle3").list_repairs(fresh(0), (0, 3, 5), MODEL))
    assert [repair.taps for repair in tried] == [(1, 4, 6), *[(0, 3, 5)] * (len(tried) - 1)]
    assert [repair.remedy for repair in tried[1:]] == [
        '"norm_before_residual": true in the draft\'s config.json',
        '"norm_output": true in the draft\'s config.json',
        '"rope_theta": 10000 in the draft\'s config.json',
    ]
    assert list(get_learned("model").list_repairs(policy(), (), MODEL)) == []
