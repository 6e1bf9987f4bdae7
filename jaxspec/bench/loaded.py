"""A checkpoint ready to answer, for the benchmarks that generate with it."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec.bench.roofline import work_of
from jaxspec.bench.workload import OPTIONS, SYNTHETIC_LENGTH, GenerateOptions, Length, config_of
from jaxspec.build import build_step, draft_lengths
from jaxspec.config.from_checkpoint import read_draft
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import PromptStream, all_problems, pad_prompts
from jaxspec.drafts.kinds import build_draft, build_network
from jaxspec.hf.pretrained import policy_checkpoint
from jaxspec.host.job import Job, start_jax
from jaxspec.host.round_cost import measured_chooser
from jaxspec.host.runner import abstract, placed, put
from jaxspec.inputs.checked import called
from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.verify import Distributions, Verdict, leading
from jaxspec.sampling import Noise
from jaxspec.state import Prompts, Ready
from jaxspec.tokens.tokenizer import load_tokenizer

CACHE = 2**25
"""Bytes of weights that the caches of a CPU hold."""


def mesh_for(options: GenerateOptions, config: ResolvedConfig) -> meshes.Mesh:
    """As many data shards as divide the prompts; on a CPU one a core, but a single one for less
    than two rows a core and weights that no cache holds: every shard reads them all from the one
    memory, and where nothing else takes long, that is what a step waits for."""
    cores = min(options.threads or meshes.cores(), meshes.cores())
    model, prompts = config.model, config.batch.prompts
    weights = work_of(model, 1, 0.0, jnp.dtype(model.dtype).itemsize).weights
    few = weights > CACHE and options.batch < 2 * cores
    shards = 1 if few else math.gcd(prompts, cores)
    largest = model.embed * max(model.ffn, model.heads * model.head_size)
    start_jax(config, shards, 1 if largest < 2**19 else cores // shards)
    there = [count for count in range(1, meshes.count_devices() + 1) if prompts % count == 0]
    return meshes.make_mesh(shards if jax.default_backend() == "cpu" else max(there), 1)


def synthetic(kept: float) -> Callable[..., Verdict]:
    """A rule that keeps `kept` tokens of a round of `SYNTHETIC_LENGTH` drafts on average, by coins
    alone, each draft as likely. It reads the distributions as often as `block_rule`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        keeps = sum(middle**depth for depth in range(SYNTHETIC_LENGTH + 1))
        low, high = (middle, high) if keeps < kept else (low, middle)
    chance = high

    def rule(
        distributions: Distributions,
        drafted: Int[Array, "B K"],
        offered: Int[Array, " B"],
        coins: Float[Array, "B K"],
        next_noise: Noise,
    ) -> Verdict:
        target_at_draft, draft_at_draft = distributions.at_drafted(drafted)
        log_weights = jnp.minimum(target_at_draft - draft_at_draft, 0)
        left_over = distributions.left_over(log_weights[:, :-1])
        # always so, which XLA does not know: it would leave the mass out
        possible = jnp.all(left_over >= 0, axis=1)
        accepted = jnp.where(possible, jnp.minimum(leading(coins < chance), offered), 0)
        rejected, whole = accepted < offered, jnp.zeros(len(accepted), coins.dtype)
        return Verdict(accepted, distributions.draw_next(accepted, rejected, whole, next_noise))

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
        rule: dict[str, Any] = {}
        if options.synthetic_acceptance:
            rule = {"rule": synthetic(options.synthetic_acceptance)}
        draft = build_draft(
            replace(config, rollout=replace(config.rollout, draft=wanted)).draft_spec, ()
        )
        return generator.with_(draft=draft, lengths=draft_lengths(wanted, generator.mesh), **rule)

    def ready(self, generator: Generator, prompts: Prompts) -> Ready:
        """Policy and draft as a generator reads them, and what it chooses lengths by."""
        network = None if generator.draft is None else self.network

        def load_all(policy: Decoder, network: Any) -> Ready:
            return generator.sync(policy, network, generator.start())

        ready = jax.jit(load_all)(self.policy, network)
        if ready.drafter.chooser is None:
            return ready
        chooser = measured_chooser(generator, ready, prompts)
        chooser = jax.device_put(chooser, meshes.replicated(generator.mesh))
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
        """The loaded model on fewer devices."""
        mesh = meshes.make_mesh(shards, 1)
        step = self.job.step
        generator, learner = (replace(side, mesh=mesh) for side in (step.generator, step.learner))
        step = replace(step, generator=generator, learner=learner)
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
    change: Callable[[ResolvedConfig], ResolvedConfig] = lambda config: config,
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
        problems = PromptStream((found,), options.seed)
    mesh = mesh_for(options, config)
    step = build_step(config, mesh, tokenizer.stop_ids if problems else (), tokenizer.size)
    shapes, layout = jax.eval_shape(step.fresh_policy), step.learner.layout
    abstract = jax.tree.map(placed, shapes, layout(shapes))
    policy = policy_checkpoint(config.model, abstract).load(lambda _: None)
    key, network = stream_key(options.seed, Stream.DRAFT_WEIGHTS), None
    if config.rollout.draft.learned:
        drawn = jax.eval_shape(lambda: build_network(config.draft_spec, key))
        wanted = jax.tree.map(placed, drawn, layout(drawn))
        if options.draft_path:
            network = read_draft(config, wanted)
        else:
            network = jax.jit(
                lambda: build_network(config.draft_spec, key), out_shardings=layout(drawn)
            )()
    job = Job(config=config, tokenizer=tokenizer, mesh=mesh, step=step)
    return Loaded(job, policy, network, options, problems, {})


def check_logprob(loaded: Loaded) -> float:
    """Summed log-probability of one fixed text's tokens but the first: the same in every program
    that reads the checkpoint rightly."""
    ids = jnp.asarray([loaded.job.tokenizer.encode(digits(1, 64, 1234)[0])], jnp.int32)

    def summed(policy: Decoder) -> Float[Array, ""]:
        logits = policy.logits(policy(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None]).hidden)
        logprobs = jax.nn.log_softmax(logits[0, :-1], axis=-1)
        return jnp.sum(jnp.take_along_axis(logprobs, ids[0, 1:, None], axis=1))

    return float(jax.jit(summed)(loaded.policy))
