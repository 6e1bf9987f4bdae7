"""`bench generate`: tokens a second of one checkpoint from text to text, and what rounds of a draft
cost beside plain decode steps."""

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

from jaxspec import mesh as meshes
from jaxspec.bench.loaded import Loaded, check_logprob, load
from jaxspec.bench.measure import (
    Timed,
    check_model,
    common,
    draw_rounds,
    process_seconds,
    timed,
)
from jaxspec.bench.roofline import remembered, work_of
from jaxspec.bench.workload import GenerateOptions, Length
from jaxspec.config.cli import override
from jaxspec.config.settings import AUTO_LENGTHS, numbers_of
from jaxspec.host.runner import TimedGeneration, ahead_with
from jaxspec.state import Rollout
from jaxspec.system.trace import Profiler

ABOUT = """Generates from prompts of random digits: text in and text out, end tokens off, so that
every answer has --new tokens. Tokens a second are those of whole calls, tokenizing included, after
two calls to warm up; calls that others on the machine disturbed do not count. With --live a table
of rounds follows: at each of those numbers of rows, the seconds of a round of each draft length
over those of a plain decode step. --synthetic_acceptance A keeps A tokens of a round of 3 drafts on
average whatever the draft says, to see what a good draft would be worth before there is one; such
tokens follow no distribution. The last line of the output is one JSON object."""


def whole_calls(loaded: Loaded, phases: dict[str, float]) -> tuple[Timed, Rollout, float]:
    """Calls from text to text; also the last rollout and the seconds of compiling."""
    options = loaded.options
    texts = loaded.texts(options.batch)
    length = options.draft_length if options.draft != "none" else 0
    generator = loaded.generator(options.batch, length)
    ready = loaded.ready(generator, loaded.prompts(texts, 0))
    began = time.perf_counter()
    program, _ = ahead_with(generator, generator.generate, ready, loaded.like(options.batch))
    compile_seconds = time.perf_counter() - began
    seen: list[Rollout] = []
    profiler = Profiler(
        numbers_of("--profile", options.profile), Path("trace-generate.json.gz"), (program,), print
    )

    def call(number: int) -> None:
        moments = [time.perf_counter()]
        prompts = loaded.prompts(texts, number)
        moments.append(time.perf_counter())
        with profiler.call(number):
            rollout = jax.device_get(program(ready, prompts))
        moments.append(time.perf_counter())
        rows = zip(rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True)
        answers = [tokens[start:end].tolist() for tokens, start, end in rows]
        made = [loaded.job.tokenizer.decode(answer) for answer in answers]
        moments.append(time.perf_counter())
        assert len(made) == options.batch, "an answer for each prompt"
        names = ("tokenize", "generate", "detokenize")
        phases.update(zip(names, np.diff(moments).tolist(), strict=True))
        seen[:] = [rollout]

    with contextlib.closing(profiler):
        return timed(call, options.repeats, options.budget), seen[0], compile_seconds


def rounds_table(loaded: Loaded) -> list[dict[str, Any]]:
    """Seconds of rounds of each draft length, and of plain steps, at each number of rows; all in
    turn, so that noise falls on all alike."""
    options = loaded.options
    every = AUTO_LENGTHS if options.draft_length == "auto" else ()
    asked = (*(options.lengths or every), options.draft_length) if options.draft != "none" else ()
    lengths: tuple[Length, ...] = tuple(dict.fromkeys((0, *asked)))
    rows = []
    for number, live in enumerate(options.live, start=1):
        here = loaded.on(math.gcd(live, loaded.job.mesh.size))
        texts = here.texts(live)
        prompts = [here.prompts(texts, repeat) for repeat in range(options.repeats + 1)]
        calls = {}
        for length in lengths:
            generator = here.generator(live, length)
            ready = here.ready(generator, prompts[0])
            calls[length] = TimedGeneration(generator, ready, prompts[0]), ready
        seen: dict[Length, list[tuple[float, float, float]]] = {length: [] for length in lengths}
        for repeat in range(options.repeats + 1):
            for length, (call, ready) in calls.items():
                made = call(ready, prompts[repeat])
                tokens = float(np.sum(made.rollout.lengths - made.rollout.prompt_lengths))
                passes = float(np.sum(made.rollout.statistics.rounds))
                per_round = made.loop_seconds / made.rounds, tokens / passes, tokens / made.rounds
                if repeat:
                    seen[length].append(per_round)
        for length, found in seen.items():
            seconds, plain = (float(np.median(np.array(seen[each])[:, 0])) for each in (length, 0))
            # chance, not noise: medians would favour one side
            kept, tokens_a_round = np.mean(np.array(found)[:, 1:], axis=0).tolist()
            row = {
                "live": live,
                "K": length,
                "round_s": seconds,
                "round_cost": seconds / plain,
                "tokens_per_pass": kept,
                "tokens_per_s": tokens_a_round / seconds,
                "speedup": tokens_a_round / live * plain / seconds,
            }
            rows.append(row)
        print(f"timed rounds of {live} rows ({number} of {len(options.live)})", flush=True)
    return rows


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark."""
    options = override(
        GenerateOptions(), argv, "python -m jaxspec.bench generate --model DIR", ABOUT
    )
    check_model(options.model, "generate")
    phases = {"import": process_seconds()}
    began = time.perf_counter()
    loaded = load(options)
    phases["load"] = time.perf_counter() - began
    taken, rollout, compile_seconds = whole_calls(loaded, phases)
    phases["first_call"] = compile_seconds + taken.first
    tokens = int(np.sum(rollout.lengths - rollout.prompt_lengths))
    rows = rounds_table(loaded) if options.live else []
    if rows:
        Console().print(draw_rounds(rows))
    model, mesh = loaded.job.config.model, loaded.job.mesh
    depth, size = options.prompt + (options.new - 1) / 2, jnp.dtype(options.dtype).itemsize
    work = work_of(model, options.batch, depth, size)
    best = remembered(options.dtype)
    drafted = float(np.sum(rollout.statistics.drafted[:, :1]))
    line = {
        **common("generate", options, taken, tokens),
        "phases_s": phases,
        "compile_s": compile_seconds,
        "check_logprob": check_logprob(loaded),
        "acceptance_length": float(np.sum(rollout.statistics.kept)) / drafted if drafted else 1.0,
        "tokens_per_target_pass": tokens / float(np.sum(rollout.statistics.rounds)),
        "bytes_per_s": work.bytes * options.new / taken.seconds,
        "flops_per_s": work.flops * options.new / taken.seconds,
        "roofline_share": best.floor(work) * options.new / taken.seconds if best else None,
        "rounds": rows,
        "machine": meshes.machine(mesh),
    }
    share = (
        f", {line['roofline_share']:.0%} of the roofline"
        if best
        else " (for its share of the roofline, run bench roofline first)"
    )
    speed = (
        f"{line['tokens_per_s']:,.0f} tokens/s, {1e3 * taken.seconds:.1f} ms a"
        f" call{' (noisy)' if taken.noisy else ''}"
    )
    cell = f"{line['peer']} {line['model']}, {options.batch} rows x {options.new} tokens"
    print(f"{cell}: {speed}{share}; compiled in {compile_seconds:.1f} s")
    print(json.dumps(line), flush=True)
    return 0
