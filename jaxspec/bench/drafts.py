"""`bench drafts`: comparison of all kinds of draft on one policy."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console

from jaxspec.bench.draft_tables import build_tables
from jaxspec.bench.loaded import synthetic_rule
from jaxspec.bench.measure import package_versions
from jaxspec.bench.variants import SWEPT_SETTINGS, VARIANTS, DraftVariant, apply_variant
from jaxspec.bench.workload import SYNTHETIC_LENGTH
from jaxspec.build import build_step
from jaxspec.config.check import check_config
from jaxspec.config.cli import take_option
from jaxspec.config.unused import DRAFT_SETTINGS
from jaxspec.data.problems import load_sets
from jaxspec.drafts import draft_temperature
from jaxspec.host.job import Job, run_program
from jaxspec.host.programs import TimedGeneration, abstract_arguments, put_like
from jaxspec.host.prompts import PromptSource
from jaxspec.host.round_cost import add_length_chooser
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream
from jaxspec.models.decoder import Decoder
from jaxspec.preparation.draft import get_or_train_draft
from jaxspec.preparation.draft_data import read_training_text
from jaxspec.preparation.policy import load_draft, load_policy, report_agreement
from jaxspec.processes.devices import describe_machine
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.feedback.acceptance import acceptance_metrics
from jaxspec.rollout.round import uses_matching
from jaxspec.state import Prompts, Rollout, RolloutWeights, Statistics
from jaxspec.step import Step
from jaxspec.storage.cache import load_tree
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress

ABOUT = """Measures every kind of draft on the policy of a config (its warm start) and its training
prompts. Drafts have the config's draft_length and temperature, and some also choose a length in
each round. Drafts are trained on first use, on the policy's answers to its prompts. For comparison
eagle3-generic is not: --generic FILE trains it on a text (JSON lines, parquet, or a dataset id, as
for --offline.text), by default on the built-in text. --generic FOLDER loads a finished EAGLE-3
head, published or exported. Each draft generates --rows N answers (default 512). The speed-up is
tokens/s over those of plain decoding in the same run. Both are medians of calls in turn. With
--synthetic_acceptance A, kinds that draw drafts keep A tokens of a round of 3 drafts on average.
Other lengths have the same chance of each draft. This shows the value of a good draft of that kind.
The last line of the output is one JSON object."""
TUNING_CALLS = 4
"""Calls that tune the draft temperatures, on prompts that are not measured."""
TIMED_CALLS = 5
"""Timed calls of each row of the table."""
USED_SETTINGS = f"{DRAFT_SETTINGS} batch.group_size rollout.draft.temperature rollout.lookup."
"""Settings that this program reads. It sets those in `SWEPT_SETTINGS` itself."""


@dataclass(kw_only=True)
class VariantBench:
    """A variant with its compiled generation and measurements."""

    variant: DraftVariant
    job: Job
    weights: RolloutWeights
    generation: TimedGeneration
    overlap: Float[Array, "K F"]
    """Decayed sums of expected acceptance, see `drafts/draft_temperature.py`."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Measured rollouts, on the host."""
    round_seconds: list[float] = field(default_factory=list)
    token_rates: list[float] = field(default_factory=list)
    """Tokens per second."""

    @property
    def current_weights(self) -> RolloutWeights:
        """Policy and draft, with the best temperatures so far."""
        drafter = self.weights.drafter
        # The compiled program accepts only the placement that it was compiled for.
        choice = put_like(
            draft_temperature.choose_factors(self.overlap, self.job.step.generator.settings.grid),
            drafter.factor_index,
        )
        return self.weights.replace(drafter=drafter.replace(factor_index=choice))

    def generate(self, prompts: Prompts) -> Rollout:
        """Generates answers to a batch."""
        return self.generation(self.current_weights, prompts).rollout

    def time_batch(self, prompts: Prompts) -> None:
        """Times the generation of answers to a batch.

        Tokens per second include the prefill, and seconds per round do not.
        """
        timing = self.generation(self.current_weights, prompts)
        tokens = float(jnp.sum(timing.rollout.lengths - timing.rollout.prompt_lengths))
        self.round_seconds.append(timing.loop_seconds / timing.rounds)
        self.token_rates.append(tokens / timing.seconds)

    def update_feedback(self, rollout: Rollout) -> None:
        """Updates temperatures and length chooser from a batch, as a run does."""
        self.overlap = draft_temperature.update_overlap(self.overlap, rollout.statistics)
        drafter = self.weights.drafter
        if drafter.chooser is not None:
            chooser = put_like(
                length_chooser.update_chooser(drafter.chooser, rollout.statistics), drafter.chooser
            )
            self.weights = self.weights.replace(drafter=drafter.replace(chooser=chooser))

    def table_row(self, baseline: "VariantBench") -> dict[str, Any]:
        """Returns the row of the table. `baseline` decodes without a draft."""
        generator = self.job.step.generator
        grid, length = generator.settings.grid, generator.draft_length
        statistics = jax.tree.map(
            lambda *leaves: np.concatenate(leaves),
            *(rollout.statistics for rollout in self.rollouts),
        )
        tokens = sum(
            int((rollout.lengths - rollout.prompt_lengths).sum()) for rollout in self.rollouts
        )
        # One set of temperatures describes all measured rollouts, since only earlier ones tune it.
        metrics = acceptance_metrics(
            jax.tree.map(jnp.asarray, statistics),
            jnp.asarray(tokens, jnp.int32),
            self.current_weights.drafter.factor_index,
            grid,
        )
        values = {name.removeprefix("rollout/"): float(value) for name, value in metrics.items()}

        def values_by_depth(name: str) -> list[float]:
            return [values[f"{name}_{depth}"] for depth in range(1, length + 1)]

        sampling, verify = _sampling_and_rule(self.variant, self.job)
        return {
            "draft": self.variant.name,
            "sampling": sampling or None,
            "verify": verify or None,
            "K": "auto" if self.variant.chooses_length else length,
            "lengths": _length_shares(statistics, generator.settings.lengths),
            **{
                name: values[name]
                for name in ("acceptance_length", "tokens_per_target_pass", "coverage")
            },
            **{name: values_by_depth(name) for name in ("conditional_rate", "expected_acceptance")},
            "draft_temperature": values_by_depth("draft_temperature") if sampling else [],
            "round_cost": float(np.median(self.round_seconds) / np.median(baseline.round_seconds)),
            "tokens_per_s": float(np.median(self.token_rates)),
            "speed_up": float(np.median(self.token_rates) / np.median(baseline.token_rates)),
        }


def _length_shares(statistics: Statistics, lengths: tuple[int, ...]) -> dict[str, float]:
    """Returns the share of rounds by draft length.

    Empty if the generator has a single length.
    """
    # `draft_rounds` counts rounds of at least a length. Shares are differences of these counts.
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
    variant: DraftVariant, job: Job, interrupt: Interrupt, policy: Decoder, prompts: Prompts
) -> VariantBench:
    """Prepares a variant.

    Loads the draft from a folder or the cache, or trains it. Compiles generation.
    """
    step, network = job.step, None
    draft = abstract_arguments(step, job.config.batch.prompts)[0].learner.draft
    if draft is not None:
        network = load_draft(job, draft.network)
        if network is not None:
            report_agreement(job, policy, network)
        else:
            text = read_training_text(job.config, job.tokenizer, job.say)
            network = load_tree(get_or_train_draft(job, interrupt, text), draft.network)
    state = add_length_chooser(
        step,
        jax.jit(step.init_state, out_shardings=step.state_shardings())(policy, network),
        prompts,
    )
    weights = jax.jit(step.sync)(state)
    generation = TimedGeneration(step.generator, weights, prompts)
    return VariantBench(
        variant=variant,
        job=job,
        weights=weights,
        generation=generation,
        overlap=state.generator.overlap_by_factor,
    )


def compare_drafts(
    job: Job, interrupt: Interrupt, rows: int, generic: str = "generic", acceptance: float = 0.0
) -> int:
    """Measures all variants on the same policy and training prompts.

    Each generates `rows` answers, rounded up to whole batches. `generic` is as in `apply_variant`,
    `acceptance` as in `_with_acceptance`.
    """
    config = job.config
    require(
        config.offline.steps > 0,
        "offline.steps is 0, so the drafts would have random weights; set it, for example to"
        " --offline.steps 300",
    )
    length = config.rollout.draft.draft_length
    remedy = "give --rollout.draft.draft_length 3 or another number"
    require(
        length != "auto",
        "rollout.draft.draft_length is auto, but bench drafts compares a fixed length with drafts"
        f" that choose it; {remedy}",
    )
    path = config.rollout.draft.path
    require(
        not path,
        f"rollout.draft.path is {path}, but bench drafts trains the drafts itself; to compare them"
        f" with this one, give --generic {path} instead of --rollout.draft.path",
    )
    require(
        jax.process_count() == 1,
        f"bench drafts runs in a single process, but {jax.process_count()} were started; start one",
    )
    configs = [apply_variant(variant, config, generic, job.say) for variant in VARIANTS]
    # Errors of any variant are reported before the first draft is trained, which takes minutes.
    for variant_config in configs:
        check_config(variant_config, job.mesh.size)
    # Answers are not scored here, so problems need no reference answers.
    sets = load_sets(config, job.tokenizer, require_answers=False)
    jobs = [
        replace(
            job,
            config=variant_config,
            step=_with_acceptance(
                build_step(
                    variant_config,
                    job.mesh,
                    job.tokenizer.stop_ids,
                    job.tokenizer.size,
                    job.step.generator.settings.stop,
                ),
                acceptance,
            ),
        )
        for variant_config in configs
    ]
    sources = [PromptSource(bench_job, sets) for bench_job in jobs]
    calls = -(-rows // (config.batch.prompts * config.batch.group_size))
    policy = load_policy(job, interrupt)
    benches = []
    for number, (variant, bench_job) in enumerate(zip(VARIANTS, jobs, strict=True), start=1):
        job.say(
            f"{number} of {len(VARIANTS)}:"
            f" {' '.join(filter(None, (variant.name, *_sampling_and_rule(variant, bench_job))))}"
        )
        benches.append(
            prepare_bench(
                variant, bench_job, interrupt, policy, sources[number - 1].place_training(0)
            )
        )
    with interrupt.exit_on_signal("measuring drafts"):
        _fill_history(benches, sources, TUNING_CALLS + calls)
        _run_benches(benches, sources, calls)
        _time_benches(benches, sources)
    # The first variant decodes plainly.
    table = [bench.table_row(benches[0]) for bench in benches]
    answers = calls * config.batch.prompts * config.batch.group_size
    Console().print(*build_tables(table), sep="\n")
    for row in table:
        if row["lengths"]:
            shares = ", ".join(
                f"{share:.0%} drafted {length}" for length, share in row["lengths"].items()
            )
            job.say(f"of the rounds that chose their length with {row['draft']}, {shares}")
    plain_seconds = float(np.median(benches[0].round_seconds))
    sampling_text = (
        f"temperature {config.rollout.temperature:g}, up to {config.rollout.max_new_tokens} tokens"
    )
    job.say(
        f"{answers} answers a row, {sampling_text}; a plain decode step takes"
        f" {1e3 * plain_seconds:.2f} ms; draft T is a factor on the temperature"
    )
    facts = {
        "bench": "drafts",
        "machine": describe_machine(job.mesh),
        "versions": package_versions(),
    }
    request = {"answers": answers, "generic": generic, "synthetic_acceptance": acceptance}
    record = {**facts, **request, "rows": table}
    print(json.dumps(record), flush=True)
    return 0


def _with_acceptance(step: Step, acceptance: float) -> Step:
    """Replaces the step's rule by a synthetic one.

    Does nothing for `acceptance` 0 and for steps that draw no drafts.
    """
    generator = step.generator
    if not acceptance or uses_matching(generator.draft, generator.settings):
        return step
    return replace(step, generator=generator.make_variant(rule=synthetic_rule(acceptance)))


def _sampling_and_rule(variant: DraftVariant, job: Job) -> tuple[str, str]:
    """Returns how a variant draws and verifies drafts, or empty strings."""
    trainable, has_draft = job.config.rollout.draft.is_learned, job.step.generator.draft is not None
    return variant.sampling if trainable else "", variant.verify if has_draft else ""


def _fill_history(benches: list[VariantBench], sources: list[PromptSource], count: int) -> None:
    """Stores earlier answers to the prompts of `count` batches.

    The same policy gives them by plain decoding.
    """
    plain, plain_source = benches[0], sources[0]
    for index in range(count):
        batch = plain_source.place_training(index)
        # With the noise of the batch itself, the history would hold the answers to come.
        rollout = plain.generate(
            batch.replace(stream=put_like(np.int32(Stream.REMEMBER), batch.stream))
        )
        for source in sources:
            source.remember(index, rollout)


def _run_benches(benches: list[VariantBench], sources: list[PromptSource], calls: int) -> None:
    """Tunes the draft temperatures, then generates the measured batches."""
    with Progress("measuring", len(benches) * (TUNING_CALLS + calls)) as progress:
        for number, (bench, source) in enumerate(zip(benches, sources, strict=True)):
            for batch in range(TUNING_CALLS + calls):
                rollout = bench.generate(source.place_training(batch))
                if batch < TUNING_CALLS:
                    bench.update_feedback(rollout)
                else:
                    bench.rollouts.append(jax.device_get(rollout))
                progress.update(number * (TUNING_CALLS + calls) + batch + 1)


def _time_benches(benches: list[VariantBench], sources: list[PromptSource]) -> None:
    """Times the first measured batch several times for each variant."""
    # Variants take turns, so that disturbances of the machine affect all of them.
    with Progress("timing", TIMED_CALLS) as progress:
        for number in range(TIMED_CALLS):
            for bench, source in zip(benches, sources, strict=True):
                bench.time_batch(source.place_training(TUNING_CALLS))
            progress.update(number + 1)


def _is_acceptance(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number == 0 or 1 <= number <= SYNTHETIC_LENGTH + 1


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    command, usage = "python -m jaxspec.bench drafts", "--config NAME.py[:SCALE]"
    rows, argv = take_option(argv, command, "rows", f"N {usage}", "512")
    generic, argv = take_option(argv, command, "generic", f"PATH {usage}", "generic")
    length, argv = take_option(argv, command, "synthetic_acceptance", f"A {usage}", "0")
    problem = ""
    if not rows.isdecimal() or int(rows) < 1:
        problem = f"--rows is {rows!r}; it must be a whole number of answers, at least 1"
    elif not _is_acceptance(length):
        problem = (
            f"--synthetic_acceptance is {length!r}; it must be the tokens kept of a round of"
            f" {SYNTHETIC_LENGTH} drafts, from 1 to {SYNTHETIC_LENGTH + 1}, or 0 to verify drafts"
        )
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return run_program(
        "bench drafts",
        ABOUT,
        lambda job, interrupt: compare_drafts(job, interrupt, int(rows), generic, float(length)),
        argv,
        SWEPT_SETTINGS,
        USED_SETTINGS,
    )
