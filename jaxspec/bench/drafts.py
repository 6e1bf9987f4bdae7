"""`bench drafts`: every kind of draft on one policy, as tables and a line of JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.bench.measure import versions
from jaxspec.build import build_step
from jaxspec.config.check import check
from jaxspec.config.cli import take_option
from jaxspec.config.settings import DraftKind, DraftSampling, LookupKind, ResolvedConfig, VerifyRule
from jaxspec.config.unused import OF_DRAFT
from jaxspec.data.problems import load_sets
from jaxspec.drafts.kinds import kind_of
from jaxspec.host.batches import Batches
from jaxspec.host.draft_data import training_text
from jaxspec.host.draft_training import cached_draft
from jaxspec.host.job import Job, process_0_first, run
from jaxspec.host.round_cost import with_chooser
from jaxspec.host.runner import TimedGeneration, abstract, put
from jaxspec.host.warm_start import load_policy
from jaxspec.inputs.checked import require
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import draft_temperature, length_chooser
from jaxspec.rollout.acceptance import acceptance_metrics
from jaxspec.state import Prompts, Ready, Rollout, Statistics
from jaxspec.storage.cache import load_tree
from jaxspec.streams import Stream
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress, short

ABOUT = """Measures every kind of draft on the policy of a config (its warm start) and its training
prompts, at its draft_length and temperature, and some with the lengths that each round chooses;
drafts are trained on first use. --rows N (default 512) answers each; the last line of the output is
one JSON object."""
TUNING = 4
"""Calls, on other prompts, from which the draft temperatures are tuned before anything is
measured."""
REPEATS = 5
"""Timed calls of each row of the table, in turn."""
VARIED = ("rollout.draft.kind", "rollout.draft.sampling", "rollout.verify", "rollout.lookup.beside")
"""What the rows of the table set."""
USED = f"{OF_DRAFT} batch.group_size rollout.draft.temperature rollout.lookup."
"""Settings that this program looks at, beside `VARIED`, which it goes through."""


class Variant(NamedTuple):
    """A row of the table: the config's draft settings with these in their place."""

    name: str
    kind: DraftKind
    sampling: DraftSampling = "auto"
    verify: VerifyRule = "block"
    beside: LookupKind = "none"
    generic: bool = False
    """Trained on text that the policy did not write."""
    chosen: bool = False
    """Each round chooses its draft length, instead of the config's."""


VARIANTS = (
    Variant("none", "none"),
    Variant("eagle3", "eagle3", "argmax"),
    Variant("eagle3", "eagle3", "sample"),
    Variant("eagle3", "eagle3"),
    Variant("eagle3", "eagle3", verify="token"),
    Variant("eagle3", "eagle3", verify="coupled"),
    Variant("eagle3-generic", "eagle3", generic=True),
    Variant("eagle3", "eagle3", chosen=True),
    Variant("mtp", "mtp"),
    Variant("mtp", "mtp", chosen=True),
    Variant("model", "model"),
    Variant("ngram", "ngram"),
    Variant("history", "history"),
    Variant("eagle3+history", "eagle3", beside="history"),
    Variant("eagle3+ngram", "eagle3", beside="ngram"),
)


def config_of(variant: Variant, config: ResolvedConfig) -> ResolvedConfig:
    """The config with a variant's draft, which keeps what both know: K, temperature, ffn, layers,
    lookup rules."""
    draft = config.rollout.draft
    draft = replace(
        draft,
        kind=variant.kind,
        sampling=variant.sampling,
        vocab=draft.vocab if "rollout.draft.vocab" in kind_of(variant.kind).settings else 0,
    )
    draft = replace(draft, draft_length="auto") if variant.chosen else draft
    lookup = replace(config.rollout.lookup, beside=variant.beside)
    rollout = replace(config.rollout, draft=draft, lookup=lookup, verify=variant.verify)
    offline = replace(config.offline, text="generic") if variant.generic else config.offline
    return replace(config, rollout=rollout, offline=offline)


@dataclass(kw_only=True)
class Bench:
    """A variant ready to run, and what it has shown so far."""

    variant: Variant
    job: Job
    ready: Ready
    call: TimedGeneration
    measured: Float[Array, "K F"]
    """Of the draft temperatures; see `rollout/draft_temperature.py`."""
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

    def row(self, plain_round: float) -> dict[str, Any]:
        """The row of the table."""
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
            "round_cost": float(np.median(self.round_seconds)) / plain_round,
            "tokens_per_s": float(np.median(self.rates)),
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
    """Draft weights from the cache, or trained now, and the compiled calls."""
    step, network = job.step, None
    shapes = abstract(step, job.config.batch.prompts)[0]
    if shapes.learner.draft is not None:
        text = training_text(job.config, job.tokenizer, job.say)
        network = load_tree(
            process_0_first(lambda: cached_draft(job, interrupt, text)),
            shapes.learner.draft.network,
        )
    state = with_chooser(
        step, jax.jit(step.start, out_shardings=step.state_shardings())(policy, network), prompts
    )
    ready = jax.jit(step.sync)(state)
    call = TimedGeneration(step.generator, ready, prompts)
    return Bench(
        variant=variant, job=job, ready=ready, call=call, measured=state.generator.overlap_by_factor
    )


def drafts(job: Job, interrupt: Interrupt, rows: int) -> int:
    """Measures every variant on the same policy and the same training prompts; `rows` answers each,
    rounded up to whole batches."""
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
        not path, f"bench drafts trains every kind by itself; leave out --rollout.draft.path {path}"
    )
    require(
        jax.process_count() == 1,
        f"{jax.process_count()} processes: drafts are measured by one alone",
    )
    configs = [config_of(variant, config) for variant in VARIANTS]
    for each in configs:
        check(each, job.mesh.size)
    sets = load_sets(config, job.tokenizer)
    jobs = [
        replace(
            job,
            config=each,
            step=build_step(
                each,
                job.mesh,
                job.tokenizer.stop_ids,
                job.tokenizer.size,
                job.step.generator.settings.stop,
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
    plain = float(np.median(benches[0].round_seconds))
    table = [bench.row(plain) for bench in benches]
    answers = calls * config.batch.prompts * config.batch.group_size
    Console().print(*_tables(table), sep="\n")
    for row in table:
        if row["lengths"]:
            shares = ", ".join(
                f"{share:.0%} drafted {length}" for length, share in row["lengths"].items()
            )
            job.say(f"of the rounds that chose their length with {row['draft']}, {shares}")
    sampled = (
        f"temperature {config.rollout.temperature:g}, up to {config.rollout.max_new_tokens} tokens"
    )
    job.say(
        f"{answers} answers a row, {sampled}; a plain decode step takes {1e3 * plain:.2f} ms;"
        " draft T is a factor on the temperature"
    )
    about = {"bench": "drafts", "machine": meshes.machine(job.mesh), "versions": versions()}
    print(json.dumps({**about, "answers": answers, "rows": table}), flush=True)
    return 0


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
        "drafts", "acceptance\nlength", "tokens\na pass", "coverage", "round\ncost", "tokens/s"
    )
    depths = _table("by depth", "conditional\nrate", "expected\nacceptance", "draft T")
    for row in rows:
        how = row["draft"], row["sampling"] or "-", row["verify"] or "-", str(row["K"])
        numbers = [
            f"{row[name]:.2f}"
            for name in ("acceptance_length", "tokens_per_target_pass", "coverage", "round_cost")
        ]
        whole.add_row(*how, *numbers, short(row["tokens_per_s"]))
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


def main(words: Sequence[str]) -> int:
    """Runs the benchmark with what the command line says."""
    given, words = take_option(
        words, "python -m jaxspec.bench drafts", "rows", "N --config NAME.py[:SCALE]", "512"
    )
    if not given.isdecimal() or int(given) < 1:
        print(
            f"error: --rows is {given!r}; a number of answers, at least 1",
            file=sys.stderr,
            flush=True,
        )
        return 2
    return run(
        "bench drafts",
        ABOUT,
        lambda job, interrupt: drafts(job, interrupt, int(given)),
        words,
        VARIED,
        USED,
    )
