"""Every use of a run's seed draws for itself alone."""

import itertools

import jax
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.drafts.kinds import build_network
from jaxspec.host import round_cost
from jaxspec.inputs.streams import Stream, stream_key, stream_rng
from jaxspec.models.decoder import Decoder
from jaxspec.state import NetworkState, Prompts
from tests.conftest import small_mesh, tiny_config, tiny_model, tiny_prompts

SEEDS, NUMBERS = (0, 1, 7, 2**32 - 1), range(6)


def test_all_streams_of_all_seeds_are_distinct() -> None:
    """Among one another, and from what a library derives of a seed by itself: its key, and the
    parts it splits it into."""
    drawn: dict[tuple[int, ...], set[tuple[int, str, int]]] = {}
    for seed in SEEDS:
        parts = [
            jax.random.key(seed),
            *jax.random.split(jax.random.key(seed)),
            *jax.random.split(jax.random.key(seed), 3),
        ]
        parts += [jax.random.fold_in(jax.random.key(seed), number) for number in range(40)]
        for place, part in enumerate(parts):
            drawn.setdefault(tuple(jax.random.key_data(part).tolist()), set()).add(
                (seed, "library", place)
            )
        for stream, number in itertools.product(Stream, NUMBERS):
            words = tuple(jax.random.key_data(stream_key(seed, stream, number)).tolist())
            drawn.setdefault(words, set()).add((seed, stream.name, number))
    ours = [uses for uses in drawn.values() if any(use[1] != "library" for use in uses)]
    assert max(map(len, ours)) == 1
    assert len(ours) == len(SEEDS) * len(Stream) * len(NUMBERS)


def test_all_streams_of_the_host_are_distinct() -> None:
    drawn = {
        tuple(stream_rng(seed, stream, number).integers(0, 2**62, 2))
        for seed in SEEDS
        for stream in Stream
        for number in NUMBERS
    }
    assert len(drawn) == len(SEEDS) * len(Stream) * len(NUMBERS)


@pytest.mark.slow
def test_weights_come_from_streams_of_their_own() -> None:
    config = tiny_config(tiny_model(dtype="float32"), seed=3)
    step = build_step(config, small_mesh(1), (), 11)
    state = jax.jit(step.init_random_state)()
    policy = Decoder(config.model, stream_key(3, Stream.POLICY_WEIGHTS))
    network = build_network(config.draft_spec, stream_key(3, Stream.DRAFT_WEIGHTS))
    learner = state.learner
    assert isinstance(learner.draft, NetworkState)
    for ours, wanted in ((learner.policy.network, policy), (learner.draft.network, network)):
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7),
            ours,
            wanted,
        )


def test_the_pilot_has_coins_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lengths are chosen by must not know how the coins of the batch that they are chosen for
    will fall."""
    seen: list[int] = []

    class Enough(Exception):
        pass

    def record(_: object, __: object, *arguments: object, **___: object) -> None:
        seen.extend(int(each.stream) for each in arguments if isinstance(each, Prompts))
        raise Enough

    monkeypatch.setattr(round_cost, "compile_for_generator", record)
    draft = tiny_config().rollout.draft.__class__(draft_length="auto")
    step = build_step(tiny_config(tiny_model(dtype="float32"), draft), small_mesh(1), (), 11)
    state = jax.jit(step.init_random_state)()
    with pytest.raises(Enough):
        round_cost.fill_length_chooser(
            step, state, tiny_prompts(8).replace(stream=jax.numpy.int32(Stream.TRAIN))
        )
    assert seen == [Stream.PILOT]
