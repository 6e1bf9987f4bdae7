"""Compiled generation of a draft's variant, with its measurements."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.bench.variants import DraftVariant
from jaxspec.config.settings import ResolvedConfig
from jaxspec.drafts import draft_temperature
from jaxspec.host.programs import SlicedAnswerer, abstract_arguments, put_like
from jaxspec.host.round_cost import fill_length_chooser
from jaxspec.metrics.batch import read_depths
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft import get_or_train_draft
from jaxspec.preparation.draft_data import read_training_text
from jaxspec.preparation.policy import load_draft, report_agreement
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.feedback.acceptance import acceptance_metrics
from jaxspec.rollout.generator import Generator
from jaxspec.state import LengthChooser, NetworkState, Prompts, Rollout, RolloutWeights, Statistics
from jaxspec.step import Step
from jaxspec.storage.cache import load_tree
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer


@dataclass(kw_only=True)
class VariantBench:
    """A variant with its compiled generation and measurements."""

    variant: DraftVariant
    sampling: str
    """How drafts are drawn. Empty unless the draft is learned."""
    verify: str
    """How drafts are verified. Empty without a draft."""
    generator: Generator
    weights: RolloutWeights
    answerer: SlicedAnswerer
    overlap: Float[Array, "K F"]
    """Decayed sums of expected acceptance, see `drafts/draft_temperature.py`."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Measured rollouts, on the host."""
    round_seconds: list[float] = field(default_factory=list)
    """Seconds of a round of each measured rollout."""
    seconds: float = 0.0
    """Seconds of all measured rollouts, prefill included."""

    @property
    def current_weights(self) -> RolloutWeights:
        """Policy and draft, with the best temperatures so far."""
        drafter = self.weights.drafter
        # The compiled program accepts only the placement that it was compiled for.
        choice = put_like(
            draft_temperature.choose_factors(self.overlap, self.generator.settings.grid),
            drafter.factor_index,
        )
        return self.weights.replace(drafter=drafter.replace(factor_index=choice))

    def generate(self, prompts: Prompts) -> Rollout:
        """Generates answers to a batch."""
        return self.answerer(self.current_weights, prompts)

    @property
    def token_count(self) -> int:
        """Number of tokens of all measured rollouts."""
        return sum(
            int((rollout.lengths - rollout.prompt_lengths).sum()) for rollout in self.rollouts
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all measured rollouts."""
        # Not the median of batches: tokens of a batch of few rows depend on how its noise falls.
        return self.token_count / self.seconds

    def measure_batch(self, prompts: Prompts) -> None:
        """Generates answers to a batch, and times it."""
        timing = self.answerer.time_call(self.current_weights, prompts)
        self.rollouts.append(jax.device_get(timing.rollout))
        self.round_seconds.append(timing.loop_seconds / timing.rounds)
        self.seconds += timing.seconds

    def update_feedback(self, rollout: Rollout) -> None:
        """Updates temperatures and length chooser from a batch, as a run does."""
        self.overlap = draft_temperature.update_overlap(self.overlap, rollout.statistics)
        drafter = self.weights.drafter
        if isinstance(drafter.chooser, LengthChooser):
            chooser = put_like(
                length_chooser.update_chooser(drafter.chooser, rollout.statistics), drafter.chooser
            )
            self.weights = self.weights.replace(drafter=drafter.replace(chooser=chooser))

    def table_row(self, baseline: "VariantBench") -> dict[str, Any]:
        """Returns the row of the table. `baseline` decodes without a draft."""
        generator = self.generator
        grid, length = generator.settings.grid, generator.draft_length
        statistics = jax.tree.map(
            lambda *leaves: np.concatenate(leaves),
            *(rollout.statistics for rollout in self.rollouts),
        )
        # One set of temperatures describes all measured rollouts, since only earlier ones tune it.
        metrics = acceptance_metrics(
            jax.tree.map(jnp.asarray, statistics),
            jnp.asarray(self.token_count, jnp.int32),
            self.current_weights.drafter.factor_index,
            grid,
        )
        values = {
            name.removeprefix("rollout/"): value for name, value in metrics_to_host(metrics).items()
        }

        return {
            "draft": self.variant.name,
            "sampling": self.sampling or None,
            "verify": self.verify or None,
            "K": "auto" if self.variant.chooses_length else length,
            "lengths": _length_shares(statistics, generator.settings.lengths),
            **{
                name: values[name]
                for name in ("acceptance_length", "tokens_per_target_pass", "coverage")
            },
            **{
                name: read_depths(values, name)
                for name in ("conditional_rate", "expected_acceptance")
            },
            "draft_temperature": read_depths(values, "draft_temperature") if self.sampling else [],
            "round_cost": float(np.median(self.round_seconds) / np.median(baseline.round_seconds)),
            "tokens_per_s": self.tokens_per_second,
            "speed_up": self.tokens_per_second / baseline.tokens_per_second,
        }


def _length_shares(statistics: Statistics, lengths: tuple[int, ...]) -> dict[str, float]:
    """Returns the share of rounds by draft length.

    The result is empty if rounds do not choose their length.
    """
    # `draft_rounds` counts rounds of at least a length, so shares are differences of these counts.
    rounds = float(statistics.rounds.sum())
    shares_at_least = [
        float(statistics.draft_rounds[:, length - 1].sum()) / rounds if length else 1.0
        for length in lengths
    ] + [0.0]
    return {
        str(length): share - next_share
        for length, (share, next_share) in zip(lengths, pairwise(shares_at_least), strict=True)
    }


def prepare_bench(
    variant: DraftVariant,
    config: ResolvedConfig,
    step: Step,
    tokenizer: Tokenizer,
    policy: Decoder,
    prompts: Prompts,
    interrupt: Interrupt,
    say: LinePrinter,
) -> VariantBench:
    """Prepares a variant.

    Loads the draft from a folder or the cache, or trains it. Compiles generation.
    """
    network = None
    draft = abstract_arguments(step, config.batch.prompts)[0].learner.draft
    if isinstance(draft, NetworkState):
        network = load_draft(config, draft.network, say)
        if network is not None:
            report_agreement(config, step.generator, tokenizer, policy, network, say)
        else:
            text = read_training_text(config, tokenizer, say)
            file = get_or_train_draft(config, step, tokenizer, text, interrupt, say)
            network = load_tree(file, draft.network)
    state = fill_length_chooser(
        step,
        jax.jit(step.init_state, out_shardings=step.state_shardings())(policy, network),
        prompts,
    )
    weights = jax.jit(step.sync)(state)
    sampling, verify = sampling_and_rule(variant, config, step.generator)
    return VariantBench(
        variant=variant,
        sampling=sampling,
        verify=verify,
        generator=step.generator,
        weights=weights,
        answerer=SlicedAnswerer(step.generator, weights, prompts),
        overlap=state.generator.overlap_by_factor,
    )


def sampling_and_rule(
    variant: DraftVariant, config: ResolvedConfig, generator: Generator
) -> tuple[str, str]:
    """Returns how a variant draws and verifies drafts.

    The first text is empty unless the draft is learned, the second one without a draft.
    """
    trainable, has_draft = config.rollout.draft.is_learned, generator.draft_length > 0
    return variant.sampling if trainable else "", variant.verify if has_draft else ""
