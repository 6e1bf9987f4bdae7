"""Checkpoints loaded for generation benchmarks."""

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
from jaxspec.bench.roofline import decode_work
from jaxspec.bench.workload import (
    OPTIONS,
    SYNTHETIC_LENGTH,
    GenerateOptions,
    LengthSetting,
    config_from_options,
)
from jaxspec.build import build_step, draft_lengths
from jaxspec.config.from_checkpoint import read_draft
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import PromptStream, load_all_problems, pad_prompts
from jaxspec.drafts.kinds import build_draft, build_network
from jaxspec.hf.pretrained import open_policy_checkpoint
from jaxspec.host.job import Job, configure_jax
from jaxspec.host.programs import abstract_arguments, abstract_leaf, put_like
from jaxspec.host.round_cost import make_length_chooser
from jaxspec.inputs.checked import translate_settings
from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.models.decoder import Decoder
from jaxspec.processes.devices import core_count, count_devices
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.rollout.verify import Distributions, Verdict, count_leading
from jaxspec.sampling import Noise
from jaxspec.state import NoChooser, Prompts, RolloutWeights
from jaxspec.tokens.tokenizer import load_tokenizer
from jaxspec.transfer import export_weights

CPU_CACHE_BYTES = 2**25
"""Bytes of weights that fit in the caches of a CPU."""


def choose_mesh(options: GenerateOptions, config: ResolvedConfig) -> meshes.Mesh:
    """Starts JAX, and chooses the mesh of a benchmark.

    It has data shards only. Their number divides the prompts. On accelerators it is the largest
    that the devices allow. On a CPU there is at most one shard per core.
    """
    cores = min(options.threads or core_count(), core_count())
    model, prompt_count = config.model, config.batch.prompts
    weight_bytes = decode_work(model, 1, 0.0, jnp.dtype(model.dtype).itemsize).weight_bytes
    # Every shard reads all weights from the same memory. With few rows and no cache that holds the
    # weights, a step waits for these reads, so a single shard is faster.
    is_read_bound = weight_bytes > CPU_CACHE_BYTES and options.batch < 2 * cores
    shards = 1 if is_read_bound else math.gcd(prompt_count, cores)
    largest_weight = model.embed * max(model.ffn, model.heads * model.head_size)
    configure_jax(config, shards, 1 if largest_weight < 2**19 else cores // shards)
    shard_counts = [count for count in range(1, count_devices() + 1) if prompt_count % count == 0]
    return meshes.make_mesh(shards if jax.default_backend() == "cpu" else max(shard_counts), 1)


def synthetic_rule(acceptance_length: float) -> Callable[..., Verdict]:
    """Returns a rule that keeps a given mean number of tokens.

    In a round of `SYNTHETIC_LENGTH` drafts it keeps `acceptance_length` tokens on average. Coins
    alone decide, and each draft has the same chance. The rule reads the distributions as often as
    `block_rule`.
    """
    # Bisection finds the chance of a draft: the mean number of tokens grows with it. 60 halvings
    # go below the resolution of a float.
    low, high = 0.0, 1.0
    for _ in range(60):
        midpoint = (low + high) / 2
        expected_tokens = sum(midpoint**depth for depth in range(SYNTHETIC_LENGTH + 1))
        low, high = (midpoint, high) if expected_tokens < acceptance_length else (low, midpoint)
    accept_probability = high

    def accept_by_coins(
        distributions: Distributions,
        draft_tokens: Int[Array, "B K"],
        draft_counts: Int[Array, " B"],
        coins: Float[Array, "B K"],
        next_noise: Noise,
    ) -> Verdict:
        # The same reads as in `block_rule`, so that a round costs as much.
        target_at_draft, draft_at_draft = distributions.draft_token_logprobs(draft_tokens)
        log_weights = jnp.minimum(target_at_draft - draft_at_draft, 0)
        residual_mass = distributions.residual_mass(log_weights[:, :-1])
        # Always true, but XLA does not know that. It would remove a mass that nothing uses.
        possible = jnp.all(residual_mass >= 0, axis=1)
        accepted = jnp.where(
            possible, jnp.minimum(count_leading(coins < accept_probability), draft_counts), 0
        )
        rejected, log_weight = accepted < draft_counts, jnp.zeros(len(accepted), coins.dtype)
        return Verdict(
            accepted, distributions.draw_next(accepted, rejected, log_weight, next_noise)
        )

    return accept_by_coins


class LoadedCheckpoint(NamedTuple):
    """Policy, draft and prompts of a benchmark."""

    job: Job
    policy: Decoder
    network: Any
    options: GenerateOptions
    problems: PromptStream | None
    """Problems to answer, or None for random digits."""
    prompt_shapes: dict[int, Prompts]
    """Cache of `abstract_prompts`, by number of prompts."""

    def build_generator(self, rows: int, length: LengthSetting) -> Generator:
        """Builds a generator of `rows` rows that drafts `length` tokens per round.

        Length 0 gives plain decoding.
        """
        options, config = self.options, self.job.config
        # All answers have the same length, so loops with fewer slots would save little.
        generator = self.job.step.generator.make_variant(prompts=rows, group_size=1, tail=())
        if length == 0:
            return generator.without_draft()
        draft_config = replace(config.rollout.draft, draft_length=length)
        mode_option: dict[str, Any] = {}
        if options.synthetic_acceptance:
            rule = synthetic_rule(options.synthetic_acceptance)
            mode_option = {"mode": Rejection(rule)}
        config = replace(config, rollout=replace(config.rollout, draft=draft_config))
        draft = build_draft(config.draft_spec, (), config.lookup_spec)
        return generator.make_variant(
            draft=draft, lengths=draft_lengths(draft_config, generator.mesh), **mode_option
        )

    def load_weights(self, generator: Generator, prompts: Prompts) -> RolloutWeights:
        """Prepares policy and draft for a generator.

        Measures round costs if the generator chooses draft lengths.
        """
        network = self.network if generator.draft_length else None

        def load_all(policy: Decoder, network: Any) -> RolloutWeights:
            exported = export_weights(policy, network, generator.dtype)
            return generator.load(exported, generator.init_state())

        weights = jax.jit(load_all)(self.policy, network)
        if isinstance(weights.drafter.chooser, NoChooser):
            return weights
        chooser = make_length_chooser(generator, weights, prompts)
        chooser = jax.device_put(chooser, meshes.replicated_sharding(generator.mesh))
        return weights.replace(drafter=weights.drafter.replace(chooser=chooser))

    def prompt_texts(self, count: int, call: int = 0) -> list[str]:
        """Returns the prompts of a call: random digits, or the next problems."""
        # Each call has other digits. A draft that learns between calls would otherwise be timed on
        # answers that it has learned.
        if self.problems is None:
            return random_digits(count, self.options.prompt, self.options.seed + call)
        return [self.problems[call * count + index].prompt for index in range(count)]

    def encode_prompts(self, texts: Sequence[str], call: int) -> Prompts:
        """Tokenizes texts, truncates them to the prompt length, and places them on the mesh.

        `call` selects the noise.
        """
        tokenizer, width = self.job.tokenizer, self.options.prompt
        shapes = self.abstract_prompts(len(texts))
        problems = [Problem(text, tuple(tokenizer.encode(text)[:width]), "", 0) for text in texts]
        tokens, lengths = pad_prompts(problems, width, tokenizer.pad_id)
        empty_prompts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        prompts = empty_prompts.replace(
            tokens=tokens, lengths=lengths, live=np.ones(len(texts), bool)
        )
        return put_like(
            prompts.replace(stream=np.int32(Stream.SAMPLE), batch=np.int32(call)), shapes
        )

    def abstract_prompts(self, rows: int) -> Prompts:
        """Returns shapes, dtypes and shardings of `rows` prompts."""
        if rows not in self.prompt_shapes:
            self.prompt_shapes[rows] = abstract_arguments(self.job.step, rows)[2]
        return self.prompt_shapes[rows]

    def with_shards(self, shards: int) -> "LoadedCheckpoint":
        """Returns the checkpoint on a mesh of `shards` data shards."""
        mesh = meshes.make_mesh(shards, 1)
        step = self.job.step
        generator, learner = (replace(side, mesh=mesh) for side in (step.generator, step.learner))
        step = replace(step, generator=generator, learner=learner)
        job = replace(self.job, mesh=mesh, step=step)
        policy, network = jax.device_put(
            (self.policy, self.network), meshes.replicated_sharding(mesh)
        )
        # The cached shapes have shardings of the old mesh.
        return self._replace(job=job, policy=policy, network=network, prompt_shapes={})


def random_digits(count: int, length: int, seed: int) -> list[str]:
    """Returns texts of random digits."""
    rng = random.Random(seed)
    return ["".join(rng.choice("0123456789") for _ in range(length)) for _ in range(count)]


def load_checkpoint(
    options: GenerateOptions,
    group: int = 1,
    adapt_config: Callable[[ResolvedConfig], ResolvedConfig] = lambda config: config,
) -> LoadedCheckpoint:
    """Loads problems, policy and draft.

    Each prompt has `group` answers. `adapt_config` changes the config that is made from the
    options. The policy may end its answers to problems, but not those to random digits.
    """
    config = adapt_config(config_from_options(options, group, print))
    tokenizer, problems = load_tokenizer(config.data.tokenizer), None
    if config.data.path:
        with translate_settings(OPTIONS):
            problem_set = load_all_problems(config.data, tokenizer)
        if str(problem_set.skipped_lines):
            print(
                f"--data {config.data.path}: {problem_set.skipped_lines}; {len(problem_set)} remain"
            )
        problems = PromptStream((problem_set,), options.seed)
    mesh = choose_mesh(options, config)
    # Without stop tokens all answers have the full length, and calls have equal work.
    step = build_step(config, mesh, tokenizer.stop_ids if problems else (), tokenizer.size)
    shapes, layout = jax.eval_shape(step.init_policy), step.learner.train_layout
    abstract_policy = jax.tree.map(abstract_leaf, shapes, layout(shapes))
    policy = open_policy_checkpoint(config.model, abstract_policy).load(lambda _: None)
    key, network = stream_key(options.seed, Stream.DRAFT_WEIGHTS), None
    if config.rollout.draft.is_learned:
        draft_shapes = jax.eval_shape(lambda: build_network(config.draft_spec, key))
        abstract_draft = jax.tree.map(abstract_leaf, draft_shapes, layout(draft_shapes))
        if options.draft_path:
            network = read_draft(config, abstract_draft)
        else:
            # Compiled, so that the random weights appear in their final sharding.
            network = jax.jit(
                lambda: build_network(config.draft_spec, key), out_shardings=layout(draft_shapes)
            )()
    job = Job(config=config, tokenizer=tokenizer, mesh=mesh, step=step)
    return LoadedCheckpoint(job, policy, network, options, problems, {})


def fixed_text_logprob(loaded: LoadedCheckpoint) -> float:
    """Returns the log-probability of a fixed text.

    It is the sum over all tokens but the first. All programs that read the checkpoint correctly
    get the same number.
    """
    ids = jnp.asarray([loaded.job.tokenizer.encode(random_digits(1, 64, 1234)[0])], jnp.int32)

    def sum_logprobs(policy: Decoder) -> Float[Array, ""]:
        logits = policy.logits(policy(ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None]).hidden)
        logprobs = jax.nn.log_softmax(logits[0, :-1], axis=-1)
        return jnp.sum(jnp.take_along_axis(logprobs, ids[0, 1:, None], axis=1))

    return float(jax.jit(sum_logprobs)(loaded.policy))
