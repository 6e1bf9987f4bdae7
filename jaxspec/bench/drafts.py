"""`bench drafts`: comparison of all kinds of draft on one policy."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxspec.bench.draft_tables import build_tables
from jaxspec.bench.loaded import synthetic_rule
from jaxspec.bench.measure import package_versions
from jaxspec.bench.variant_bench import VariantBench, prepare_bench, sampling_and_rule
from jaxspec.bench.variants import SWEPT_SETTINGS, VARIANTS, DraftVariant, apply_variant
from jaxspec.bench.workload import SYNTHETIC_LENGTH
from jaxspec.build import build_step
from jaxspec.config.check import check_config
from jaxspec.config.cli import take_option
from jaxspec.config.settings import ResolvedConfig
from jaxspec.config.unused import DRAFT_SETTINGS
from jaxspec.data.problems import load_sets
from jaxspec.host.job import Job, run_program
from jaxspec.host.programs import put_like
from jaxspec.host.prompts import PromptSource
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream
from jaxspec.preparation.policy import load_policy
from jaxspec.processes.devices import describe_machine
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.step import Step
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.system.terminal import LinePrinter

ABOUT = """Measures every kind of draft on the policy of a config (its warm start) and its training
prompts. Drafts have the config's draft_length and temperature, and some also choose a length in
each round. Drafts are trained on first use, on the policy's answers to its prompts. For comparison
eagle3-generic is not: --generic FILE trains it on a text (JSON lines, parquet, or a dataset id, as
for --offline.text), by default on the built-in text. --generic FOLDER loads a finished EAGLE-3
head, published or exported. Each draft generates --rows N answers (default 512), in batches of
batch.prompts x batch.group_size. All drafts generate a batch in turn. Tokens/s are all tokens over
all seconds, and the speed-up is over plain decoding. --drafts eagle3,ngram measures only the drafts
of these names, beside plain decoding. With --synthetic_acceptance A, kinds that draw drafts keep A
tokens of a round of 3 drafts on average. Other lengths have the same chance of each draft. This
shows the value of a good draft of that kind.
The last line of the output is one JSON object."""
PLAIN = VARIANTS[0].name
DRAFT_NAMES = tuple(dict.fromkeys(variant.name for variant in VARIANTS))
GENERIC_TEXT = "generic"
"""The built-in text, as in `offline.text`."""
TUNING_CALLS = 4
"""Calls that tune the draft temperatures, on prompts that are not measured."""
# The config's check refuses groups of one answer, as of a single row, with the usual baseline.
USED_SETTINGS = (
    f"{DRAFT_SETTINGS} batch.group_size advantage.baseline rollout.draft.temperature"
    " rollout.lookup."
)
"""Settings that this program reads. It sets those in `SWEPT_SETTINGS` itself."""


def compare_drafts(
    job: Job,
    interrupt: Interrupt,
    rows: int,
    generic: str = GENERIC_TEXT,
    acceptance: float = 0.0,
    variants: Sequence[DraftVariant] = VARIANTS,
) -> int:
    """Measures variants on the same policy and training prompts.

    The first variant decodes plainly. Each generates `rows` answers, rounded up to whole batches.
    `generic` is as in `apply_variant`, `acceptance` as in `_with_acceptance`.
    """
    config, tokenizer, say = job.config, job.tokenizer, job.say
    _check_request(config)
    configs = [apply_variant(variant, config, generic, say) for variant in variants]
    # Errors of any variant are reported before the first draft is trained, which takes minutes.
    for variant_config in configs:
        _check_variant(variant_config, job.mesh.size)
    # Answers are not scored here, so problems need no reference answers.
    sets = load_sets(config, tokenizer, require_answers=False)
    stop_strings = job.step.generator.settings.stop
    steps = [
        _with_acceptance(
            build_step(variant_config, job.mesh, tokenizer.stop_ids, tokenizer.size, stop_strings),
            acceptance,
        )
        for variant_config in configs
    ]
    sources = [
        PromptSource(sets, step.generator, config.batch.prompts, tokenizer.pad_id) for step in steps
    ]
    calls = -(-rows // (config.batch.prompts * config.batch.group_size))
    policy = load_policy(config, job.step, tokenizer, interrupt, say)
    benches = []
    for variant, variant_config, step, source in zip(
        variants, configs, steps, sources, strict=True
    ):
        labels = variant.name, *sampling_and_rule(variant, variant_config, step.generator)
        say(f"{len(benches) + 1} of {len(variants)}: {' '.join(filter(None, labels))}")
        prompts = source.place_training(0)
        benches.append(
            prepare_bench(variant, variant_config, step, tokenizer, policy, prompts, interrupt, say)
        )
    with interrupt.exit_on_signal("measuring drafts"):
        _fill_history(benches, sources, TUNING_CALLS + calls)
        _tune_benches(benches, sources)
        _measure_benches(benches, sources, calls)
    table = [bench.table_row(benches[0]) for bench in benches]
    answers = calls * config.batch.prompts * config.batch.group_size
    _report_table(table, config, answers, float(np.median(benches[0].round_seconds)), say)
    facts = {
        "bench": "drafts",
        "machine": describe_machine(job.mesh),
        "versions": package_versions(),
    }
    request = {"answers": answers, "generic": generic, "synthetic_acceptance": acceptance}
    record = {**facts, **request, "rows": table}
    print(json.dumps(record), flush=True)
    return 0


def _check_request(config: ResolvedConfig) -> None:
    """Checks that drafts can be compared here.

    Raises:
      ConfigError: drafts choose their length, or come from a folder. Or the job has several
        processes.
    """
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


def _check_variant(config: ResolvedConfig, device_count: int) -> None:
    """Raises ConfigError for a variant that cannot run, or whose draft keeps random weights."""
    draft = config.rollout.draft
    require(
        config.offline.steps > 0 or bool(draft.path) or not draft.is_learned,
        f"offline.steps is 0, so the draft {draft.kind} would have random weights; set it, for"
        " example to --offline.steps 300, or leave the draft out of --drafts",
    )
    check_config(config, device_count)


def _report_table(
    table: list[dict[str, Any]],
    config: ResolvedConfig,
    answers: int,
    plain_seconds: float,
    say: LinePrinter,
) -> None:
    """Prints the tables, the lengths chosen, and the seconds of a plain step."""
    Console().print(*build_tables(table), sep="\n")
    for row in table:
        if row["lengths"]:
            shares = ", ".join(
                f"{share:.0%} drafted {length}" for length, share in row["lengths"].items()
            )
            say(f"of the rounds that chose their length with {row['draft']}, {shares}")
    sampling_text = (
        f"temperature {config.rollout.temperature:g}, up to {config.rollout.max_new_tokens} tokens"
    )
    say(
        f"{answers} answers a row, {sampling_text}; a plain decode step takes"
        f" {1e3 * plain_seconds:.2f} ms; draft T is a factor on the temperature"
    )


def _with_acceptance(step: Step, acceptance: float) -> Step:
    """Replaces the step's rule by a synthetic one.

    Does nothing for `acceptance` 0 and for steps that draw no drafts.
    """
    generator = step.generator
    if not acceptance or not isinstance(generator.settings.mode, Rejection):
        return step
    synthetic_mode = Rejection(synthetic_rule(acceptance))
    return replace(step, generator=generator.make_variant(mode=synthetic_mode))


def _fill_history(benches: list[VariantBench], sources: list[PromptSource], count: int) -> None:
    """Stores earlier answers to the prompts of `count` batches, for drafts that look them up.

    The first bench gives them, by plain decoding of the same policy.
    """
    plain, plain_source = benches[0], sources[0]
    looking_up = [source for source in sources if source.history.past]
    if not looking_up:
        return
    for index in range(count):
        batch = plain_source.place_training(index)
        # With the noise of the batch itself, these would be the very answers that are measured.
        rollout = plain.generate(
            batch.replace(stream=put_like(np.int32(Stream.REMEMBER), batch.stream))
        )
        for source in looking_up:
            source.remember_answers(index, rollout)


def _tune_benches(benches: list[VariantBench], sources: list[PromptSource]) -> None:
    """Tunes the draft temperatures and length choosers."""
    with Progress("tuning", len(benches)) as progress:
        for number, (bench, source) in enumerate(zip(benches, sources, strict=True)):
            for batch in range(TUNING_CALLS):
                bench.update_feedback(bench.generate(source.place_training(batch)))
            progress.update(number + 1)


def _measure_benches(benches: list[VariantBench], sources: list[PromptSource], calls: int) -> None:
    """Generates and times the measured batches."""
    with Progress("measuring", calls) as progress:
        for number in range(calls):
            # Variants take turns, so that disturbances of the machine affect all of them.
            for bench, source in zip(benches, sources, strict=True):
                bench.measure_batch(source.place_training(TUNING_CALLS + number))
            progress.update(number + 1)


def _is_valid_acceptance(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number == 0 or 1 <= number <= SYNTHETIC_LENGTH + 1


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark. Returns the exit status."""
    command, usage = "python -m jaxspec.bench drafts", "--config NAME.py[:SCALE]"
    rows, argv = take_option(argv, command, "rows", f"N {usage}", "512")
    generic, argv = take_option(argv, command, "generic", f"PATH {usage}", GENERIC_TEXT)
    length, argv = take_option(argv, command, "synthetic_acceptance", f"A {usage}", "0")
    text, argv = take_option(argv, command, "drafts", f"NAMES {usage}", ",".join(DRAFT_NAMES))
    names = {PLAIN, *map(str.strip, text.split(","))}
    variants = [variant for variant in VARIANTS if variant.name in names]
    problem = ""
    if not rows.isdecimal() or int(rows) < 1:
        problem = f"--rows is {rows!r}; it must be a whole number of answers, at least 1"
    elif not _is_valid_acceptance(length):
        problem = (
            f"--synthetic_acceptance is {length!r}; it must be the tokens kept of a round of"
            f" {SYNTHETIC_LENGTH} drafts, from 1 to {SYNTHETIC_LENGTH + 1}, or 0 to verify drafts"
        )
    elif unknown := sorted(names - set(DRAFT_NAMES)):
        problem = (
            f"--drafts has {', '.join(map(repr, unknown))}; it must be some of"
            f" {', '.join(DRAFT_NAMES)}, separated by commas"
        )
    elif generic != GENERIC_TEXT and not any(variant.is_generic for variant in variants):
        problem = f"--generic is {generic}, but --drafts leaves out the draft that reads it"
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    return run_program(
        "bench drafts",
        ABOUT,
        lambda job, interrupt: compare_drafts(
            job, interrupt, int(rows), generic, float(length), variants
        ),
        argv,
        SWEPT_SETTINGS,
        USED_SETTINGS,
    )
