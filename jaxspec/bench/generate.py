"""`bench generate`: tokens per second and round costs of one checkpoint."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxspec.bench.loaded import LoadedCheckpoint, fixed_text_logprob, load_checkpoint
from jaxspec.bench.measure import (
    CallTimings,
    build_rounds_table,
    common_fields,
    process_age_seconds,
    require_model,
    time_calls,
)
from jaxspec.bench.roofline import decode_work, read_roofline
from jaxspec.bench.workload import GenerateOptions, LengthSetting
from jaxspec.config.cli import override_settings
from jaxspec.config.settings import AUTO_LENGTHS, parse_range
from jaxspec.host.programs import SlicedAnswerer, compile_answerer
from jaxspec.processes.devices import describe_machine
from jaxspec.state import Prompts, Rollout
from jaxspec.system.trace import Profiler

ABOUT = """Generates from prompts of random digits, from text to text. End tokens are off, so every
answer has --new tokens. Tokens per second are those of whole calls, tokenizing included. Two calls
warm up, and calls that other processes disturbed do not count. With --live a table of rounds
follows. At each of those numbers of rows it has the round cost of each draft length: seconds of a
round over those of a plain decode step. --synthetic_acceptance A keeps A tokens of a round of 3
drafts on average, whatever the draft predicts. This shows the value of a good draft before there
is one, but its tokens follow no distribution. The last line of the output is one JSON object."""


def time_whole_calls(
    loaded: LoadedCheckpoint, phases: dict[str, float]
) -> tuple[CallTimings, Rollout, float]:
    """Times calls from text to text.

    Returns their times, the last rollout, and the seconds of compiling. Writes the seconds of the
    last call's phases into `phases`.
    """
    options = loaded.options
    texts = loaded.prompt_texts(options.batch)
    draft_length = options.draft_length if options.draft != "none" else 0
    generator = loaded.build_generator(options.batch, draft_length)
    weights = loaded.load_weights(generator, loaded.encode_prompts(texts, 0))
    start_time = time.perf_counter()
    answerer = compile_answerer(generator, weights, loaded.abstract_prompts(options.batch))
    compile_seconds = time.perf_counter() - start_time
    rollouts: list[Rollout] = []
    profiler = Profiler(
        parse_range("--profile", options.profile),
        Path("trace-generate.json.gz"),
        (answerer,),
        print,
    )

    def answer_prompts(call_index: int) -> None:
        timestamps = [time.perf_counter()]
        prompts = loaded.encode_prompts(texts, call_index)
        timestamps.append(time.perf_counter())
        with profiler.trace_call(call_index):
            # Copying waits for the program, which would otherwise run on after this time.
            rollout = jax.device_get(answerer(weights, prompts))
        timestamps.append(time.perf_counter())
        rows = zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True)
        answers = [tokens[prompt_length:length].tolist() for tokens, prompt_length, length in rows]
        answer_texts = [loaded.job.tokenizer.decode(answer) for answer in answers]
        timestamps.append(time.perf_counter())
        assert len(answer_texts) == options.batch, "an answer for each prompt"
        names = ("tokenize", "generate", "detokenize")
        phases.update(zip(names, np.diff(timestamps).tolist(), strict=True))
        # Only the last rollout is kept, as the record needs the statistics of a single one.
        rollouts[:] = [rollout]

    # Fewer calls than the profiled range may follow, and closing writes their trace.
    with contextlib.closing(profiler):
        return (
            time_calls(answer_prompts, options.repeats, options.budget),
            rollouts[0],
            compile_seconds,
        )


def measure_rounds(loaded: LoadedCheckpoint) -> list[dict[str, Any]]:
    """Times rounds of each draft length, and plain steps.

    Returns a row of the table for each number of rows and each length.
    """
    options = loaded.options
    auto_lengths = AUTO_LENGTHS if options.draft_length == "auto" else ()
    requested_lengths = (
        (*(options.lengths or auto_lengths), options.draft_length)
        if options.draft != "none"
        else ()
    )
    # Length 0, the plain step, is the denominator of all round costs.
    lengths: tuple[LengthSetting, ...] = tuple(dict.fromkeys((0, *requested_lengths)))
    rows = []
    for number, live in enumerate(options.live, start=1):
        # Rows must divide evenly among the shards.
        checkpoint = loaded.with_shards(math.gcd(live, loaded.job.mesh.size))
        texts = checkpoint.prompt_texts(live)
        # Each repeat has noise of its own, so that token counts average over more answers.
        prompts = [
            checkpoint.encode_prompts(texts, repeat) for repeat in range(options.repeats + 1)
        ]
        measurements = _time_lengths(checkpoint, live, lengths, prompts)
        for length, samples in measurements.items():
            seconds, plain_seconds = (
                float(np.median(np.array(measurements[compared_length])[:, 0]))
                for compared_length in (length, 0)
            )
            # Means, unlike for seconds: token counts vary by chance, not by noise of the machine,
            # and a median of skewed counts would be biased.
            tokens_per_pass, tokens_per_round = np.mean(np.array(samples)[:, 1:], axis=0).tolist()
            row = {
                "live": live,
                "K": length,
                "round_s": seconds,
                "round_cost": seconds / plain_seconds,
                "tokens_per_pass": tokens_per_pass,
                "tokens_per_s": tokens_per_round / seconds,
                "speedup": tokens_per_round / live * plain_seconds / seconds,
            }
            rows.append(row)
        print(f"timed rounds of {live} rows ({number} of {len(options.live)})", flush=True)
    return rows


def _time_lengths(
    checkpoint: LoadedCheckpoint,
    live: int,
    lengths: tuple[LengthSetting, ...],
    prompts: list[Prompts],
) -> dict[LengthSetting, list[tuple[float, float, float]]]:
    """Times rounds of each draft length on the same prompts.

    A sample has seconds per round, tokens per pass and tokens per round. The first batch of
    `prompts` warms up and gives no sample.
    """
    answerers = {}
    for length in lengths:
        generator = checkpoint.build_generator(live, length)
        weights = checkpoint.load_weights(generator, prompts[0])
        answerers[length] = SlicedAnswerer(generator, weights, prompts[0]), weights
    measurements: dict[LengthSetting, list[tuple[float, float, float]]] = {
        length: [] for length in lengths
    }
    # Lengths take turns, so that noise of the machine affects all of them.
    for repeat, batch in enumerate(prompts):
        for length, (answerer, weights) in answerers.items():
            timing = answerer.time_call(weights, batch)
            tokens = float(np.sum(timing.rollout.lengths - timing.rollout.prompt_lengths))
            passes = float(np.sum(timing.rollout.statistics.rounds))
            per_round = (
                timing.loop_seconds / timing.rounds,
                tokens / passes,
                tokens / timing.rounds,
            )
            # The first repeat warms up.
            if repeat:
                measurements[length].append(per_round)
    return measurements


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark. Returns the exit status."""
    options = override_settings(
        GenerateOptions(), argv, "python -m jaxspec.bench generate --model DIR", ABOUT
    )
    require_model(options.model, "generate")
    phases = {"import": process_age_seconds()}
    start_time = time.perf_counter()
    loaded = load_checkpoint(options)
    phases["load"] = time.perf_counter() - start_time
    timings, rollout, compile_seconds = time_whole_calls(loaded, phases)
    phases["first_call"] = compile_seconds + timings.first_seconds
    tokens = int(np.sum(rollout.lengths - rollout.prompt_lengths))
    rows = measure_rounds(loaded) if options.live else []
    if rows:
        Console().print(build_rounds_table(rows))
    model, mesh = loaded.job.config.model, loaded.job.mesh
    # The work of a step is taken at the mean length of a row over the steps of its answer.
    length, itemsize = options.prompt + (options.new - 1) / 2, jnp.dtype(options.dtype).itemsize
    work = decode_work(model, options.batch, length, itemsize)
    roofline = read_roofline(options.dtype)
    # Column 0 counts the rounds with at least one draft.
    drafted_rounds = float(np.sum(rollout.statistics.draft_rounds[:, :1]))
    record = {
        **common_fields("generate", options, timings, tokens),
        "phases_s": phases,
        "compile_s": compile_seconds,
        "check_logprob": fixed_text_logprob(loaded),
        "acceptance_length": float(np.sum(rollout.statistics.quarter_tokens)) / drafted_rounds
        if drafted_rounds
        else 1.0,
        "tokens_per_target_pass": tokens / float(np.sum(rollout.statistics.rounds)),
        "bytes_per_s": work.read_bytes * options.new / timings.seconds,
        "flops_per_s": work.flops * options.new / timings.seconds,
        "roofline_share": roofline.min_seconds(work) * options.new / timings.seconds
        if roofline
        else None,
        "rounds": rows,
        "machine": describe_machine(mesh),
    }
    roofline_text = (
        f", {record['roofline_share']:.0%} of the roofline"
        if roofline
        else " (for its share of the roofline, run bench roofline first)"
    )
    speed_text = (
        f"{record['tokens_per_s']:,.0f} tokens/s, {1e3 * timings.seconds:.1f} ms a"
        f" call{' (noisy)' if timings.is_noisy else ''}"
    )
    cell = f"{record['peer']} {record['model']}, {options.batch} rows x {options.new} tokens"
    print(f"{cell}: {speed_text}{roofline_text}; compiled in {compile_seconds:.1f} s")
    print(json.dumps(record), flush=True)
    return 0
