"""What a config asks for is what is built: the draft of that kind, rule and length, and a network
of those sizes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Lowered

from jaxspec.config.settings import (
    BatchConfig,
    DraftConfig,
    LookupConfig,
    RolloutConfig,
)
from jaxspec.drafts.base import PLAIN, Context, Draft, Proposal
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.kinds import build_draft, build_network, check_fits
from jaxspec.drafts.lookup.drafting import history_draft, ngram_draft, prefer_lookup
from jaxspec.drafts.model.drafting import model_draft
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, HeadSpec, RopeSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.mtp import Mtp
from jaxspec.rollout.generate import begin
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from jaxspec.sampling import Processing
from jaxspec.state import Prompts
from tests.conftest import eagle3, tiny_config, tiny_model, tiny_network
from tests.rollout.harness import drafter
from tests.twins import numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

GROUP, WIDTH, ENDS = 2, 9, (1, 3)


class Built(NamedTuple):
    draft: DraftConfig
    wanted: Draft
    """The same draft, put together by hand."""
    lookup: LookupConfig = LookupConfig()
    network: Any = None
    shapes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    loaded: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        name = (
            self.draft.kind
            if self.lookup.beside == "none"
            else f"{self.draft.kind} beside {self.lookup.beside}"
        )
        name = f"{name}, {self.draft.path}" if self.draft.path else name
        return f"{name} {self.lookup.rule}" if "ngram" in name else name


BUILT = [
    Built(
        DraftConfig(kind="eagle3", draft_length=2, eagle3=Eagle3Config(vocab=6, ffn=12)),
        recurrent_draft(2, (1, 2, 3)),
        network=Eagle3,
        shapes={"fuse": (48, 16), "head": (16, 6), "vocabulary": (6,), "first.gate": (1, 16, 12)},
    ),
    Built(
        DraftConfig(kind="eagle3", draft_length=2, path="a head"),
        recurrent_draft(2, (0, 4)),
        network=Eagle3,
        shapes={
            "fuse": (32, 8),
            "tap_norms": (2, 16),
            "embedding": (11, 8),
            "layers.gate": (1, 8, 12),
            "head": (8, 11),
        },
        loaded={
            "head": HeadSpec(taps=(0, 4), fuse_norms=True, own_embedding=True),
            "draft_model": tiny_model(
                layers=2, embed=8, heads=2, kv_heads=1, ffn=12, dtype="float32"
            ),
        },
    ),
    Built(
        DraftConfig(kind="model", draft_length=2, path="a model"),
        model_draft(2),
        network=Decoder,
        shapes={"embedding": (11, 8), "layers.query": (3, 8, 2, 4)},
        loaded={"draft_model": tiny_model(layers=3, embed=8, heads=2, kv_heads=1)},
    ),
    Built(
        DraftConfig(kind="mtp", draft_length=3, mtp=MtpConfig(layers=2, embedding_first=False)),
        recurrent_draft(3, depth=2),
        network=Mtp,
        shapes={"project": (2, 32, 16), "layers.gate": (2, 16, 24)},
    ),
    Built(
        DraftConfig(kind="model", draft_length=2, model=DraftModelConfig(layers=2, ffn=8)),
        model_draft(2),
        network=Decoder,
        shapes={"embedding": (11, 16), "layers.query": (2, 16, 4, 4), "layers.gate": (2, 16, 8)},
    ),
    Built(
        DraftConfig(kind="ngram", draft_length=3),
        ngram_draft(3, "hf", 1, 3, ENDS),
        LookupConfig(rule="hf", min_match=1, max_match=3),
    ),
    Built(
        DraftConfig(kind="ngram", draft_length=3),
        ngram_draft(3, "vllm", 1, 3, ENDS),
        LookupConfig(rule="vllm", min_match=1, max_match=3),
    ),
    Built(
        DraftConfig(kind="ngram", draft_length=4),
        ngram_draft(4, "latest", 2, 2, ENDS),
        LookupConfig(rule="latest", min_match=2, max_match=2),
    ),
    Built(
        DraftConfig(kind="history", draft_length=3),
        history_draft(3, GROUP, 1, 3),
        LookupConfig(min_match=1, max_match=3),
    ),
    Built(
        DraftConfig(kind="eagle3", draft_length=2),
        prefer_lookup(history_draft(2, GROUP, 1, 3), recurrent_draft(2, (1, 2, 3))),
        LookupConfig(beside="history", min_match=1, max_match=3),
        network=Eagle3,
        shapes={"head": (16, 11), "first.gate": (1, 16, 24)},
    ),
]


def texts() -> Prompts:
    """Prompts of 3 to 9 tokens out of three, end tokens among them, with two earlier answers
    each."""
    random = np.random.default_rng(0)
    tokens = random.choice([1, 3, 4], (8, 3, WIDTH))
    lengths = random.integers(3, WIDTH + 1, (8, 3))
    return Prompts(
        tokens=jnp.asarray(tokens[:, 0], jnp.int32),
        lengths=jnp.asarray(lengths[:, 0], jnp.int32),
        live=jnp.ones(8, bool),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
        history=jnp.asarray(tokens[:, 1:], jnp.int32),
        history_lengths=jnp.asarray(lengths[:, 1:], jnp.int32),
    )


def proposing(draft: Draft, network: Any) -> Lowered:
    """The program that proposes the first block after `texts`, the most likely tokens."""
    settings = Settings(GROUP, 4, Processing(stop_ids=ENDS), Matching())

    def likeliest(logits: jax.Array, offset: int, ids: jax.Array | None = None) -> jax.Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def run(target: Decoder, network: Any, prompts: Prompts) -> Proposal:
        state = begin(
            target,
            drafter(network, draft),
            draft,
            prompts,
            jnp.int32(0),
            jax.random.key(0),
            settings,
        )
        context = Context(state.rollout.tokens, state.rollout.lengths)
        return draft.propose(
            network, target, state.draft, state.caches.draft, context, likeliest, draft.max_length
        )[2]

    return jax.jit(run).lower(tiny_network(Decoder, tiny_model(), 1), network, texts())


@pytest.mark.parametrize("case", BUILT, ids=str)
def test_a_config_gives_its_draft_and_network(case: Built) -> None:
    rollout = RolloutConfig(max_new_tokens=4, draft=case.draft, lookup=case.lookup)
    config = tiny_config(
        rollout=rollout, batch=BatchConfig(prompts=8, group_size=GROUP), **case.loaded
    )
    draft = build_draft(config.draft_spec, ENDS, config.lookup_spec)
    network = tiny_network(lambda _, key: build_network(config.draft_spec, key), config.model, 2)
    assert draft[:3] == case.wanted[:3]  # length, taps, and whether it draws
    assert draft.max_length == case.draft.draft_length
    assert type(network) is (case.network or type(None))
    if network is not None:
        sizes = {name: value.shape for name, value in numpy_weights(network).items()}
        assert case.shapes.items() <= sizes.items()
    if isinstance(network, Mtp):
        assert (network.depth, network.embedding_first) == (2, False)
    program = proposing(draft, network)
    assert program.as_text() == proposing(case.wanted, network).as_text()
    found = jax.tree.map(
        np.asarray, program.compile()(tiny_network(Decoder, tiny_model(), 1), network, texts())
    )
    assert found.tokens.shape == (8 * GROUP, case.draft.draft_length)
    assert (found.lengths > 0).any()
    if vocab := config.draft_spec.vocab:
        assert (found.tokens < vocab).all()


def test_none_is_plain_decoding() -> None:
    config = tiny_config(draft=DraftConfig(kind="none"))
    assert build_draft(config.draft_spec, ENDS) is PLAIN
    assert build_network(config.draft_spec, jax.random.key(0)) is None


@pytest.mark.parametrize(
    ("network", "other", "message"),
    [
        (
            eagle3,
            {"embed": 32},
            (
                r"Eagle3 draft does not fit.*hidden size is 16, the policy's 32; its width of 3"
                r" taps is 48, .* 96\. "
            ),
        ),
        (eagle3, {"vocab": 24}, r"vocabulary is 12, the policy's 24"),
        (
            Mtp,
            {"embed": 32},
            r"Mtp draft does not fit the policy: its hidden size is 16, the policy's 32",
        ),
        (
            Decoder,
            {"vocab": 24},
            r"Decoder draft does not fit the policy: its vocabulary is 12, the policy's 24",
        ),
    ],
)
def test_a_draft_made_for_another_policy_is_refused_with_both_numbers(
    network: Any, other: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_fits(
            {eagle3: "eagle3", Mtp: "mtp", Decoder: "model"}[network],
            tiny_network(network, tiny_model(vocab=12, embed=16)),
            tiny_model(**{"vocab": 12, "embed": 16, **other}),
        )


def test_heads_that_were_made_for_another_policy_are_refused_in_other_forms_too() -> None:
    """A head's own width is its own affair; what it reads and looks up is not."""
    form = {"taps": (0, 4), "own_embedding": True, "sizes": {"embed": 8}}
    network = tiny_network(functools.partial(eagle3, **form), tiny_model(vocab=12))
    check_fits("eagle3", network, tiny_model(vocab=12))
    with pytest.raises(ConfigError, match=r"width of 2 taps is 32, the policy's 64"):
        check_fits("eagle3", network, tiny_model(vocab=12, embed=32))
    with pytest.raises(
        ConfigError,
        match=r"vocabulary is 12, the policy's 13; its embedding table is 12, the policy's 13",
    ):
        check_fits("eagle3", network, tiny_model(vocab=13))
    last = tiny_network(functools.partial(eagle3, use_taps=False), tiny_model())
    check_fits("eagle3", last, tiny_model())
    with pytest.raises(ConfigError, match=r"hidden size is 16, the policy's 32"):
        check_fits("eagle3", last, tiny_model(embed=32))


def test_a_head_under_a_mixture_of_experts_is_dense_and_as_wide_as_a_tokens_experts() -> None:
    family = FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2)
    config = tiny_config(
        model=tiny_model(family=family, rope_factor=4.0, rope=RopeSpec(context=64))
    )
    shapes = jax.eval_shape(lambda: build_network(config.draft_spec, jax.random.key(0)))
    assert isinstance(shapes, Eagle3)
    assert (shapes.first.gate.shape, shapes.first.query_norm, shapes.config.rope_factor) == (
        (1, 16, 48),
        None,
        4.0,
    )
    layers = jax.eval_shape(
        lambda: build_network(
            tiny_config(config.model, DraftConfig(kind="mtp")).draft_spec, jax.random.key(0)
        )
    )
    assert isinstance(layers, Mtp)
    assert layers.layers.expert_gate.shape == (1, 4, 16, 24)


def test_a_draft_with_a_vocabulary_of_its_own_is_judged_by_the_vocabulary_it_maps_into() -> None:
    network = eagle3(tiny_model(vocab=12), jax.random.key(0), vocab=5)
    check_fits("eagle3", network, tiny_model(vocab=12))
    with pytest.raises(ConfigError, match=r"its vocabulary is 12, the policy's 13"):
        check_fits("eagle3", network, tiny_model(vocab=13))
