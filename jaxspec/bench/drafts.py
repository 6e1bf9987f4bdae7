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
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.bench.loaded import synthetic
from jaxspec.bench.measure import versions
from jaxspec.bench.variants import VARIANTS, VARIED, Variant, config_of
from jaxspec.bench.workload import SYNTHETIC_LENGTH
from jaxspec.build import build_step
from jaxspec.config.check import check
from jaxspec.config.cli import take_option
from jaxspec.config.unused import OF_DRAFT
from jaxspec.data.problems import load_sets
from jaxspec.drafts import draft_temperature
from jaxspec.host.batches import Batches
from jaxspec.host.draft_data import training_text
from jaxspec.host.draft_training import cached_draft
from jaxspec.host.job import Job, run
from jaxspec.host.round_cost import with_chooser
from jaxspec.host.runner import TimedGeneration, abstract, put
from jaxspec.host.warm_start import load_draft, load_policy, say_agreement
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import length_chooser
from jaxspec.rollout.acceptance import acceptance_metrics
from jaxspec.rollout.round import by_matching
from jaxspec.state import Prompts, Ready, Rollout, Statistics
from jaxspec.step import Step
from jaxspec.storage.cache import load_tree
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress, short

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
TUNING = 4
"""Calls, on other prompts, from which the draft temperatures are tuned before anything is
measured."""
REPEATS = 5
"""Timed calls of each row of the table, in turn."""
USED = f"{OF_DRAFT} batch.group_size rollout.draft.temperature rollout.lookup."
"""Settings that this program looks at, beside `VARIED`, which it goes through."""


@dataclass(kw_only=True)
class Bench:
    """A variant ready to run, and what it has shown so far."""

    variant: Variant
    job: Job
    ready: Ready
    call: TimedGeneration
    measured: Float[Array, "K F"]
    """Of the draft temperatures; see `drafts/draft_temperature.py`."""
    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts that are measured, on the host."""
    round_seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens a second."""

    @property
    def tuned(self) -> Ready:
        """Policy and draft, at the temperatures that are best by now."""
        drafter = self.ready.drafter
        choice = put(
            draft_temperature.choose(self.measured, self.job.step.generator.settings.grid),
            drafter.choice,
        )
        return self.ready.replace(drafter=drafter.replace(choice=choice))

    def generate(self, prompts: Prompts) -> Rollout:
        """Answers a batch."""
        return self.call(self.tuned, prompts).rollout

    def time(self, prompts: Prompts) -> None:
        """Answers a batch against the clock: tokens a second with its prefill, seconds a round
        without."""
        made = self.call(self.tuned, prompts)
        tokens = float(jnp.sum(made.rollout.lengths - made.rollout.prompt_lengths))
        self.round_seconds.append(made.loop_seconds / made.rounds)
        self.rates.append(tokens / made.seconds)

    def learn(self, rollout: Rollout) -> None:
        """Takes over what a batch says of the draft's temperatures and lengths, as a run does."""
        self.measured = draft_temperature.update(self.measured, rollout.statistics)
        drafter = self.ready.drafter
        if drafter.chooser is not None:
            chooser = put(
                length_chooser.update(drafter.chooser, rollout.statistics), drafter.chooser
            )
            self.ready = self.ready.replace(drafter=drafter.replace(chooser=chooser))

    def row(self, plain: "Bench") -> dict[str, Any]:
        """The row of the table; `plain` is the one that decodes without a draft."""
        generator = self.job.step.generator
        grid, length = generator.settings.grid, generator.draft_length
        every = jax.tree.map(
            lambda *leaves: np.concatenate(leaves),
            *(rollout.statistics for rollout in self.rollouts),
        )
        tokens = sum(
            int((rollout.lengths - rollout.prompt_lengths).sum()) for rollout in self.rollouts
        )
        made = acceptance_metrics(
            jax.tree.map(jnp.asarray, every),
            jnp.asarray(tokens, jnp.int32),
            self.tuned.drafter.choice,
            grid,
        )
        measured = {name.removeprefix("rollout/"): float(value) for name, value in made.items()}

        def by_depth(name: str) -> list[float]:
            return [measured[f"{name}_{depth}"] for depth in range(1, length + 1)]

        sampling, verify = _how(self.variant, self.job)
        return {
            "draft": self.variant.name,
            "sampling": sampling or None,
            "verify": verify or None,
            "K": "auto" if self.variant.chosen else length,
            "lengths": _shares(every, generator.settings.lengths),
            **{
                name: measured[name]
                for name in ("acceptance_length", "tokens_per_target_pass", "coverage")
            },
            **{name: by_depth(name) for name in ("conditional_rate", "expected_acceptance")},
            "draft_temperature": by_depth("draft_temperature") if sampling else [],
            "round_cost": float(np.median(self.round_seconds) / np.median(plain.round_seconds)),
            "tokens_per_s": float(np.median(self.rates)),
            "speed_up": float(np.median(self.rates) / np.median(plain.rates)),
        }


def _shares(statistics: Statistics, lengths: tuple[int, ...]) -> dict[str, float]:
    """Share of the rounds, over rows, that drafted so many tokens; nothing where all draft
    alike."""
    rounds = float(statistics.rounds.sum())
    at_least = [
        float(statistics.drafted[:, length - 1].sum()) / rounds if length else 1.0
        for length in lengths
    ] + [0.0]
    return {
        str(length): more - less
        for length, (more, less) in zip(lengths, pairwise(at_least), strict=True)
    }


def prepare(
    variant: Variant, job: Job, interrupt: Interrupt, policy: Decoder, prompts: Prompts
) -> Bench:
    """Draft weights from a folder, from the cache, or trained now, and the compiled calls."""
    step, network = job.step, None
    draft = abstract(step, job.config.batch.prompts)[0].learner.draft
    if draft is not None:
        network = load_draft(job, draft.network)
        if network is not None:
            say_agreement(job, policy, network)
        else:
            text = training_text(job.config, job.tokenizer, job.say)
            network = load_tree(cached_draft(job, interrupt, text), draft.network)
    state = with_chooser(
        step, jax.jit(step.start, out_shardings=step.state_shardings())(policy, network), prompts
    )
    ready = jax.jit(step.sync)(state)
    call = TimedGeneration(step.generator, ready, prompts)
    return Bench(
        variant=variant, job=job, ready=ready, call=call, measured=state.generator.overlap_by_factor
    )


def drafts(
    job: Job, interrupt: Interrupt, rows: int, generic: str = "generic", acceptance: float = 0.0
) -> int:
    """Measures every variant on the same policy and the same training prompts; `rows` answers each,
    rounded up to whole batches. `generic` is as in `config_of`, `acceptance` as in
    `_prescribed`."""
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
    configs = [config_of(variant, config, generic, job.say) for variant in VARIANTS]
    for each in configs:
        check(each, job.mesh.size)
    sets = load_sets(config, job.tokenizer, answers=False)
    jobs = [
        replace(
            job,
            config=each,
            step=_prescribed(
                build_step(
                    each,
                    job.mesh,
                    job.tokenizer.stop_ids,
                    job.tokenizer.size,
                    job.step.generator.settings.stop,
                ),
                acceptance,
            ),
        )
        for each in configs
    ]
    batches = [Batches(each, sets) for each in jobs]
    calls = -(-rows // (config.batch.prompts * config.batch.group_size))
    policy = load_policy(job, interrupt)
    benches = []
    for number, (variant, each) in enumerate(zip(VARIANTS, jobs, strict=True), start=1):
        job.say(
            f"{number} of {len(VARIANTS)}:"
            f" {' '.join(filter(None, (variant.name, *_how(variant, each))))}"
        )
        benches.append(prepare(variant, each, interrupt, policy, batches[number - 1].train(0)))
    with interrupt.nothing_unsaved("measuring drafts"):
        _remember(benches, batches, TUNING + calls)
        _measure(benches, batches, calls)
        _time(benches, batches)
    table = [bench.row(benches[0]) for bench in benches]
    answers = calls * config.batch.prompts * config.batch.group_size
    Console().print(*_tables(table), sep="\n")
    for row in table:
        if row["lengths"]:
            shares = ", ".join(
                f"{share:.0%} drafted {length}" for length, share in row["lengths"].items()
            )
            job.say(f"of the rounds that chose their length with {row['draft']}, {shares}")
    plain = float(np.median(benches[0].round_seconds))
    sampled = (
        f"temperature {config.rollout.temperature:g}, up to {config.rollout.max_new_tokens} tokens"
    )
    job.say(
        f"{answers} answers a row, {sampled}; a plain decode step takes {1e3 * plain:.2f} ms;"
        " draft T is a factor on the temperature"
    )
    about = {"bench": "drafts", "machine": meshes.machine(job.mesh), "versions": versions()}
    asked = {"answers": answers, "generic": generic, "synthetic_acceptance": acceptance}
    line = {**about, **asked, "rows": table}
    print(json.dumps(line), flush=True)
    return 0


def _prescribed(step: Step, acceptance: float) -> Step:
    """The step with as many drafts kept as is prescribed, if it draws drafts; 0: as it is."""
    generator = step.generator
    if not acceptance or by_matching(generator.draft, generator.settings):
        return step
    return replace(step, generator=generator.with_(rule=synthetic(acceptance)))


def _how(variant: Variant, job: Job) -> tuple[str, str]:
    """How a variant's tokens are drawn and verified; empty where it does neither."""
    learned, drafted = job.config.rollout.draft.learned, job.step.generator.draft is not None
    return variant.sampling if learned else "", variant.verify if drafted else ""


def _remember(benches: list[Bench], batches: list[Batches], count: int) -> None:
    """Earlier answers to the prompts of `count` batches: of the same policy by plain decoding,
    under other noise."""
    plain, prompts = benches[0], batches[0]
    for batch in range(count):
        asked = prompts.train(batch)
        rollout = plain.generate(asked.replace(stream=put(np.int32(Stream.REMEMBER), asked.stream)))
        for other in batches:
            other.remember(batch, rollout)


def _measure(benches: list[Bench], batches: list[Batches], calls: int) -> None:
    """Tunes the draft temperatures on the first batches, then generates those that count."""
    with Progress("measuring", len(benches) * (TUNING + calls)) as progress:
        for number, (bench, asked) in enumerate(zip(benches, batches, strict=True)):
            for batch in range(TUNING + calls):
                rollout = bench.generate(asked.train(batch))
                if batch < TUNING:
                    bench.learn(rollout)
                else:
                    bench.rollouts.append(jax.device_get(rollout))
                progress.update(number * (TUNING + calls) + batch + 1)


def _time(benches: list[Bench], batches: list[Batches]) -> None:
    """Times the first batch that counts, variant after variant and all over again: what disturbs
    the machine disturbs all alike."""
    with Progress("timing", REPEATS) as progress:
        for number in range(REPEATS):
            for bench, asked in zip(benches, batches, strict=True):
                bench.time(asked.train(TUNING))
            progress.update(number + 1)


def _tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """The rows as rich prints them, in 80 columns: what drafts are worth in all, and depth by
    depth."""
    whole = _table(
        "drafts", "acceptance\nlength", "tokens\na pass", "round\ncost", "tokens/s", "speed-up"
    )
    depths = _table("by depth", "conditional\nrate", "expected\nacceptance", "draft T")
    for row in rows:
        how = row["draft"], row["sampling"] or "-", row["verify"] or "-", str(row["K"])
        numbers = [
            f"{row[name]:.2f}"
            for name in ("acceptance_length", "tokens_per_target_pass", "round_cost")
        ]
        speed = short(row["tokens_per_s"]), f"{row['speed_up']:.2f}"
        whole.add_row(*how, *numbers, *speed)
        lists = [
            row[name] for name in ("conditional_rate", "expected_acceptance", "draft_temperature")
        ]
        depths.add_row(
            *how, *(" ".join(f"{number:.2f}" for number in numbers) or "-" for numbers in lists)
        )
    return whole, depths


def _table(name: str, *titles: str) -> Table:
    table = Table(box=box.SIMPLE, title=name, title_justify="left", padding=0, show_edge=False)
    table.add_column("draft", no_wrap=True)
    for title in ("sampling", "verify", "K", *titles):
        table.add_column(title, justify="right")
    return table


def _is_acceptance(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number == 0 or 1 <= number <= SYNTHETIC_LENGTH + 1


def main(words: Sequence[str]) -> int:
    """Runs the benchmark with what the command line says."""
    command, form = "python -m jaxspec.bench drafts", "--config NAME.py[:SCALE]"
    given, words = take_option(words, command, "rows", f"N {form}", "512")
    generic, words = take_option(words, command, "generic", f"PATH {form}", "generic")
    kept, words = take_option(words, command, "synthetic_acceptance", f"A {form}", "0")
    problem = ""
    if not given.isdecimal() or int(given) < 1:
        problem = f"--rows is {given!r}; a number of answers, at least 1"
    elif not _is_acceptance(kept):
        problem = (
            f"--synthetic_acceptance is {kept!r}; tokens kept of a round of {SYNTHETIC_LENGTH}"
            f" drafts, from 1 to {SYNTHETIC_LENGTH + 1}, or 0 for those that are really kept"
        )
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return run(
        "bench drafts",
        ABOUT,
        lambda job, interrupt: drafts(job, interrupt, int(given), generic, float(kept)),
        words,
        VARIED,
        USED,
    )
