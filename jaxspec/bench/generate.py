"""`bench generate`: tokens a second of one checkpoint from text to text, and what rounds of a draft
cost beside plain decode steps."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.bench.measure import Timed, check_model, common, process_seconds, timed
from jaxspec.bench.roofline import remembered, work_of
from jaxspec.bench.workload import OPTIONS, SYNTHETIC_LENGTH, GenerateOptions, Length, config_of
from jaxspec.config.checked import called
from jaxspec.config.cli import override
from jaxspec.config.settings import AUTO_LENGTHS, Config, numbers_of
from jaxspec.data.problems import Problem, PromptStream, all_problems, pad_prompts
from jaxspec.data.tokenizer import load_tokenizer
from jaxspec.drafts.build import build_draft, build_network
from jaxspec.hf.from_checkpoint import read_draft
from jaxspec.hf.pretrained import policy_checkpoint
from jaxspec.host.job import Job, start_jax
from jaxspec.host.round_cost import measured_chooser
from jaxspec.host.runner import TimedGeneration, abstract, ahead, placed, put
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.verify import Verdict, leading
from jaxspec.sampling import Noise, categorical
from jaxspec.state import Prompts, Ready, Rollout
from jaxspec.step import build_step
from jaxspec.streams import Stream, stream_key
from jaxspec.system.trace import Profiler

ABOUT = """Generates from prompts of random digits: text in and text out, end tokens off, so that
every answer has --new tokens. Tokens a second are those of whole calls, tokenizing included, after
two calls to warm up; calls that others on the machine disturbed do not count. With --live a table
of rounds follows: at each of those numbers of rows, the seconds of a round of each draft length
over those of a plain decode step. --synthetic_acceptance A keeps A tokens of a round of 3 drafts on
average whatever the draft says, to see what a good draft would be worth before there is one; such
tokens follow no law. The last line of the output is one JSON object."""
CACHE = 2**25
"""Bytes of weights that the caches of a CPU hold."""


def mesh_for(options: GenerateOptions, config: Config) -> meshes.Mesh:
    """As many data shards as divide the prompts; on a CPU one a core, but a single one for less
    than two rows a core and weights that no cache holds: every shard reads them all from the one
    memory, and where nothing else takes long, that is what a step waits for."""
    cores = min(options.threads or meshes.cores(), meshes.cores())
    prompts, weights = (
        config.grpo.prompts,
        work_of(config.model, 1, 0.0, jnp.dtype(config.model.dtype).itemsize).weights,
    )
    few = weights > CACHE and options.batch < 2 * cores
    shards = (
        1
        if few
        else max(
            count for count in range(1, cores + 1) if prompts % count == 0 and cores % count == 0
        )
    )
    largest = config.model.embed * max(
        config.model.ffn, config.model.heads * config.model.head_size
    )
    start_jax(config, shards, 1 if largest < 2**19 else cores // shards)
    there = [count for count in range(1, meshes.count_devices() + 1) if prompts % count == 0]
    return meshes.make_mesh(shards if jax.default_backend() == "cpu" else max(there), 1)


def synthetic(kept: float) -> Callable[..., Verdict]:
    """A rule that keeps `kept` tokens of a round of `SYNTHETIC_LENGTH` drafts on average, by coins
    alone, each draft as likely."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if sum(middle**depth for depth in range(SYNTHETIC_LENGTH + 1)) < kept
            else (low, middle)
        )
    chance = high

    def rule(
        target_logprobs: Float[Array, "B K1 V"],
        draft_logprobs: Float[Array, "B K V"],
        drafted: Int[Array, "B K"],
        offered: Int[Array, " B"],
        coins: Float[Array, "B K"],
        next_noise: Noise,
    ) -> Verdict:
        accepted = jnp.minimum(leading(coins < chance), offered)
        at_cut = jnp.take_along_axis(target_logprobs, accepted[:, None, None], axis=1)[:, 0]
        return Verdict(accepted, categorical(at_cut, next_noise))

    return rule


class Loaded(NamedTuple):
    """A checkpoint ready to answer."""

    job: Job
    policy: Decoder
    network: Any
    options: GenerateOptions
    problems: PromptStream | None
    """What is asked; None: random digits."""
    shapes: dict[int, Prompts]
    """Of prompts, by their number."""

    def generator(self, rows: int, length: Length) -> Generator:
        """That of so many rows, drafting so many tokens a round."""
        options, config = self.options, self.job.config
        # every row has the same number of tokens
        generator = self.job.step.generator.with_(prompts=rows, group_size=1, tail=())
        if length == 0:
            return generator.plain()
        wanted = replace(config.rollout.draft, draft_length=length)
        rule: dict[str, Any] = (
            {"rule": synthetic(options.synthetic_acceptance)}
            if options.synthetic_acceptance
            else {}
        )
        draft = build_draft(replace(config, rollout=replace(config.rollout, draft=wanted)), ())
        return generator.with_(draft=draft, lengths=wanted.lengths, **rule)

    def ready(self, generator: Generator, prompts: Prompts) -> Ready:
        """Policy and draft as a generator reads them, and what it chooses lengths by."""
        network = None if generator.draft is None else self.network
        ready = jax.jit(lambda policy, network: generator.load(policy, network, generator.start()))(
            self.policy, network
        )
        if ready.drafter.chooser is None:
            return ready
        chooser = jax.device_put(
            measured_chooser(generator, ready, prompts), meshes.replicated(generator.mesh)
        )
        return ready.replace(drafter=ready.drafter.replace(chooser=chooser))

    def texts(self, count: int, call: int = 0) -> list[str]:
        """What a call asks: random digits of its own, or the problems whose turn it is."""
        if self.problems is None:
            return digits(count, self.options.prompt, self.options.seed + call)
        return [self.problems[call * count + place].prompt for place in range(count)]

    def prompts(self, texts: Sequence[str], call: int) -> Prompts:
        """Texts as token ids, cut to the length of the prompts, on the mesh."""
        tokenizer, width = self.job.tokenizer, self.options.prompt
        like = self.like(len(texts))
        problems = [Problem(text, tuple(tokenizer.encode(text)[:width]), "", 0) for text in texts]
        tokens, lengths = pad_prompts(problems, width, tokenizer.pad_id)
        nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        asked = nothing.replace(tokens=tokens, lengths=lengths, live=np.ones(len(texts), bool))
        return put(asked.replace(stream=np.int32(Stream.SAMPLE), batch=np.int32(call)), like)

    def like(self, rows: int) -> Prompts:
        """Shapes and shardings of prompts."""
        if rows not in self.shapes:
            self.shapes[rows] = abstract(self.job.step, rows)[2]
        return self.shapes[rows]

    def on(self, shards: int) -> "Loaded":
        """The same on fewer devices."""
        mesh = meshes.make_mesh(shards, 1)
        step = self.job.step
        step = replace(
            step,
            generator=replace(step.generator, mesh=mesh),
            learner=replace(step.learner, mesh=mesh),
        )
        job = replace(self.job, mesh=mesh, step=step)
        policy, network = jax.device_put((self.policy, self.network), meshes.replicated(mesh))
        return self._replace(job=job, policy=policy, network=network, shapes={})


def digits(count: int, length: int, seed: int) -> list[str]:
    """Texts of random digits."""
    source = random.Random(seed)
    return ["".join(source.choice("0123456789") for _ in range(length)) for _ in range(count)]


def load(
    options: GenerateOptions,
    group: int = 1,
    change: Callable[[Config], Config] = lambda config: config,
) -> Loaded:
    """Reads problems, policy and draft, for the config that `change` makes of the options'; answers
    to problems end where the policy ends them, those to random digits do not."""
    config = change(config_of(options, group, print))
    tokenizer, problems = load_tokenizer(config.data.tokenizer), None
    if config.data.path:
        with called(OPTIONS):
            found = all_problems(config.data, tokenizer)
        if str(found.left_out):
            print(f"--data {config.data.path}: {found.left_out}; {len(found)} to ask")
        problems = PromptStream(found, options.seed)
    mesh = mesh_for(options, config)
    step = build_step(config, mesh, tokenizer.stop_ids if problems else (), tokenizer.size)
    shapes, layout = jax.eval_shape(step.fresh_policy), step.learner.layout
    abstract = jax.tree.map(placed, shapes, layout(shapes))
    policy = policy_checkpoint(config.model, abstract).load(lambda _: None)
    key, network = stream_key(options.seed, Stream.DRAFT_WEIGHTS), None
    if config.rollout.draft.learned:
        drawn = jax.eval_shape(lambda: build_network(config, key))
        wanted = jax.tree.map(placed, drawn, layout(drawn))
        if options.draft_path:
            network = read_draft(config, wanted)
        else:
            network = jax.jit(lambda: build_network(config, key), out_shardings=layout(drawn))()
    return Loaded(
        Job(config=config, tokenizer=tokenizer, mesh=mesh, step=step),
        policy,
        network,
        options,
        problems,
        {},
    )


def whole_calls(loaded: Loaded, phases: dict[str, float]) -> tuple[Timed, Rollout, float]:
    """Calls from text to text; also the last rollout and the seconds of compiling."""
    options = loaded.options
    texts = loaded.texts(options.batch)
    generator = loaded.generator(
        options.batch, options.draft_length if options.draft != "none" else 0
    )
    ready = loaded.ready(generator, loaded.prompts(texts, 0))
    began = time.perf_counter()
    program, _ = ahead(generator.generate, ready, loaded.like(options.batch))
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
        answers = [
            tokens[start:end]
            for tokens, start, end in zip(
                rollout.tokens, rollout.prompt_lengths, rollout.lengths, strict=True
            )
        ]
        made = [loaded.job.tokenizer.decode(answer.tolist()) for answer in answers]
        moments.append(time.perf_counter())
        assert len(made) == options.batch, "an answer for each prompt"
        phases.update(
            zip(("tokenize", "generate", "detokenize"), np.diff(moments).tolist(), strict=True)
        )
        seen[:] = [rollout]

    with contextlib.closing(profiler):
        return timed(call, options.repeats, options.budget), seen[0], compile_seconds


def check_logprob(loaded: Loaded) -> float:
    """Summed log-probability of one fixed text's tokens but the first: the same in every program
    that reads the checkpoint rightly."""
    ids = jnp.asarray([loaded.job.tokenizer.encode(digits(1, 64, 1234)[0])], jnp.int32)

    def summed(policy: Decoder) -> Float[Array, ""]:
        logits = policy.logits(policy(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None]).hidden)
        logprobs = jax.nn.log_softmax(logits[0, :-1], axis=-1)
        return jnp.sum(jnp.take_along_axis(logprobs, ids[0, 1:, None], axis=1))

    return float(jax.jit(summed)(loaded.policy))


def rounds_table(loaded: Loaded) -> list[dict[str, Any]]:
    """Seconds of rounds of each draft length, and of plain steps, at each number of rows; all in
    turn, so that noise falls on all alike."""
    options = loaded.options
    every = AUTO_LENGTHS if options.draft_length == "auto" else ()
    asked = (*(options.lengths or every), options.draft_length) if options.draft != "none" else ()
    lengths: tuple[Length, ...] = tuple(dict.fromkeys((0, *asked)))
    rows = []
    for number, live in enumerate(options.live, start=1):
        devices = loaded.job.mesh.size
        here = loaded.on(
            max(
                count
                for count in range(1, devices + 1)
                if live % count == 0 and devices % count == 0
            )
        )
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
                if repeat:
                    seen[length].append(
                        (made.loop_seconds / made.rounds, tokens / passes, tokens / made.rounds)
                    )
        for length, found in seen.items():
            seconds, plain = (float(np.median(np.array(seen[each])[:, 0])) for each in (length, 0))
            # chance, not noise: medians would favour one side
            kept, together = np.mean(np.array(found)[:, 1:], axis=0).tolist()
            row = {
                "live": live,
                "K": length,
                "round_s": seconds,
                "round_cost": seconds / plain,
                "tokens_per_pass": kept,
            }
            rows.append(
                row
                | {
                    "tokens_per_s": together / seconds,
                    "speedup": together / live * plain / seconds,
                }
            )
        print(f"timed rounds of {live} rows ({number} of {len(options.live)})", flush=True)
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, title="rounds", title_justify="left", padding=0, show_edge=False)
    for title in ("rows", "K", "ms a round", "round cost", "tokens a pass", "tokens/s", "speed-up"):
        table.add_column(title, justify="right")
    for row in rows:
        numbers = (
            f"{1e3 * row['round_s']:.3f}",
            f"{row['round_cost']:.2f}",
            f"{row['tokens_per_pass']:.2f}",
        )
        table.add_row(
            str(row["live"]),
            str(row["K"]),
            *numbers,
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speedup']:.2f}",
        )
    return table


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
        Console().print(_table(rows))
    model, mesh = loaded.job.config.model, loaded.job.mesh
    work = work_of(
        model,
        options.batch,
        options.prompt + (options.new - 1) / 2,
        jnp.dtype(options.dtype).itemsize,
    )
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
