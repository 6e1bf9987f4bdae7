"""`bench drafts`: every kind of draft on one policy, as tables and a line of JSON."""

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
prompts, at its draft_length and temperature, and some with the lengths that each round chooses.
Drafts are trained on first use, on what the policy answers to its prompts; for comparison one,
eagle3-generic, is not: --generic FILE trains it on a text (JSON lines or parquet, or a dataset id,
as for --offline.text; without, the built-in text), --generic FOLDER takes an EAGLE-3 head that is
ready, published or exported, as it is. --rows N (default 512) answers each. Speed-up is tokens/s
over those of plain decoding in the same run, both medians of calls in turn.
--synthetic_acceptance A keeps A tokens of a round of 3 drafts on average, and other lengths with
the same chance of each draft, for kinds that draw drafts: to see what a good draft of that kind
would be worth. The last line of the output is one JSON object."""
TUNING_CALLS = 4
"""Calls, on other prompts, from which the draft temperatures are tuned before anything is
measured."""
TIMED_CALLS = 5
"""Timed calls of each row of the table, in turn."""
USED_SETTINGS = f"{DRAFT_SETTINGS} batch.group_size rollout.draft.temperature rollout.lookup."
"""Settings that this program looks at, beside `SWEPT_SETTINGS`, which it goes through."""


@dataclass(kw_only=True)
class VariantBench:
    """A variant ready to run, and what it has shown so far."""

    variant: DraftVariant
    job: Job
    weights: RolloutWeights
    generation: TimedGeneration
    overlap: Float[Array, "K F"]
    """Of the draft temperatures; see `drafts/draft_temperature.py`."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts that are measured, on the host."""
    round_seconds: list[float] = field(default_factory=list)
    token_rates: list[float] = field(default_factory=list)
    """Tokens a second."""

    @property
    def current_weights(self) -> RolloutWeights:
        """Policy and draft, at the temperatures that are best by now."""
        drafter = self.weights.drafter
        choice = put_like(
            draft_temperature.choose_factors(self.overlap, self.job.step.generator.settings.grid),
            drafter.factor_index,
        )
        return self.weights.replace(drafter=drafter.replace(factor_index=choice))

    def generate(self, prompts: Prompts) -> Rollout:
        """Answers a batch."""
        return self.generation(self.current_weights, prompts).rollout

    def time_batch(self, prompts: Prompts) -> None:
        """Answers a batch against the clock: tokens a second with its prefill, seconds a round
        without."""
        timing = self.generation(self.current_weights, prompts)
        tokens = float(jnp.sum(timing.rollout.lengths - timing.rollout.prompt_lengths))
        self.round_seconds.append(timing.loop_seconds / timing.rounds)
        self.token_rates.append(tokens / timing.seconds)

    def update_feedback(self, rollout: Rollout) -> None:
        """Takes over what a batch says of the draft's temperatures and lengths, as a run does."""
        self.overlap = draft_temperature.update_overlap(self.overlap, rollout.statistics)
        drafter = self.weights.drafter
        if drafter.chooser is not None:
            chooser = put_like(
                length_chooser.update_chooser(drafter.chooser, rollout.statistics), drafter.chooser
            )
            self.weights = self.weights.replace(drafter=drafter.replace(chooser=chooser))

    def table_row(self, baseline: "VariantBench") -> dict[str, Any]:
        """The row of the table; `baseline` is the one that decodes without a draft."""
        generator = self.job.step.generator
        grid, length = generator.settings.grid, generator.draft_length
        statistics = jax.tree.map(
            lambda *leaves: np.concatenate(leaves),
            *(rollout.statistics for rollout in self.rollouts),
        )
        tokens = sum(
            int((rollout.lengths - rollout.prompt_lengths).sum()) for rollout in self.rollouts
        )
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
    """Share of the rounds, over rows, that drafted so many tokens; nothing where all draft
    alike."""
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
    """Draft weights from a folder, from the cache, or trained now, and the compiled calls."""
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
    """Measures every variant on the same policy and the same training prompts; `rows` answers each,
    rounded up to whole batches. `generic` is as in `apply_variant`, `acceptance` as in
    `_with_acceptance`."""
    config = job.config
    require(
        config.offline.steps > 0,
        "offline.steps is 0: the drafts would have random weights; set --offline.steps 300 or so",
    )
    length = config.rollout.draft.draft_length
    remedy = "give --rollout.draft.draft_length 3 or another number"
    require(
        length != "auto",
        "bench drafts compares drafts of one length with those that choose it, in rows of their"
        f" own; {remedy}",
    )
    path = config.rollout.draft.path
    require(
        not path,
        "bench drafts trains every kind by itself, and compares them with a head that is ready:"
        f" give --generic {path} instead of --rollout.draft.path",
    )
    require(
        jax.process_count() == 1,
        f"{jax.process_count()} processes: drafts are measured by one alone",
    )
    configs = [apply_variant(variant, config, generic, job.say) for variant in VARIANTS]
    for variant_config in configs:
        check_config(variant_config, job.mesh.size)
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
    """The step with as many drafts kept as is prescribed, if it draws drafts; 0: as it is."""
    generator = step.generator
    if not acceptance or uses_matching(generator.draft, generator.settings):
        return step
    return replace(step, generator=generator.make_variant(rule=synthetic_rule(acceptance)))


def _sampling_and_rule(variant: DraftVariant, job: Job) -> tuple[str, str]:
    """How a variant's tokens are drawn and verified; empty where it does neither."""
    trainable, has_draft = job.config.rollout.draft.is_learned, job.step.generator.draft is not None
    return variant.sampling if trainable else "", variant.verify if has_draft else ""


def _fill_history(benches: list[VariantBench], sources: list[PromptSource], count: int) -> None:
    """Earlier answers to the prompts of `count` batches: of the same policy by plain decoding,
    under other noise."""
    plain, plain_source = benches[0], sources[0]
    for index in range(count):
        batch = plain_source.place_training(index)
        rollout = plain.generate(
            batch.replace(stream=put_like(np.int32(Stream.REMEMBER), batch.stream))
        )
        for source in sources:
            source.remember(index, rollout)


def _run_benches(benches: list[VariantBench], sources: list[PromptSource], calls: int) -> None:
    """Tunes the draft temperatures on the first batches, then generates those that count."""
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
    """Times the first batch that counts, variant after variant and all over again: what disturbs
    the machine disturbs all alike."""
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
    """Runs the benchmark with what the command line says."""
    command, usage = "python -m jaxspec.bench drafts", "--config NAME.py[:SCALE]"
    rows, argv = take_option(argv, command, "rows", f"N {usage}", "512")
    generic, argv = take_option(argv, command, "generic", f"PATH {usage}", "generic")
    length, argv = take_option(argv, command, "synthetic_acceptance", f"A {usage}", "0")
    problem = ""
    if not rows.isdecimal() or int(rows) < 1:
        problem = f"--rows is {rows!r}; a number of answers, at least 1"
    elif not _is_acceptance(length):
        problem = (
            f"--synthetic_acceptance is {length!r}; tokens kept of a round of {SYNTHETIC_LENGTH}"
            f" drafts, from 1 to {SYNTHETIC_LENGTH + 1}, or 0 for those that are really kept"
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
