"""What a config asks for, made: the step's two sides with their losses, optimizers and sizes.

The config is opened once, here; what is made knows only its own parts.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.config.settings import DraftConfig, ResolvedConfig
from jaxspec.drafts import draft_temperature, schedule
from jaxspec.drafts.kinds import build_draft, build_network, get_kind
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.own_code import describe_error, import_function
from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.kernels.key_chunks import CHUNK_POSITIONS
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.models.weight_layout import WeightLayout, fastest_layout
from jaxspec.rl import advantages, loss_terms, losses, optimizers
from jaxspec.rl.draft_objective import LOSSES, DraftObjective
from jaxspec.rl.learner import Learner
from jaxspec.rollout.decode_state import StopStrings
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Verification
from jaxspec.rollout.verification.fused import FUSED, is_supported
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.step import HOST_MEMORY, AdvantageFunction, Step


def build_step(
    config: ResolvedConfig,
    mesh: Mesh,
    stop_ids: tuple[int, ...],
    vocab_size: int,
    stop_strings: StopStrings | None = None,
) -> Step:
    """Opens the config once and hands its parts to those who use them; of the vocabulary, ids below
    `vocab_size` have a token, and `stop_strings` finds `rollout.stop` in them."""
    rollout = config.rollout
    processing = Processing(
        banned=rollout.banned,
        min_new_tokens=rollout.min_new_tokens,
        stop_ids=stop_ids,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        vocab_size=vocab_size,
    )
    generator = _build_generator(config, mesh, processing, stop_strings)
    lora, model = config.lora, config.model
    adapters = stream_key(config.seed, Stream.ADAPTERS)
    return Step(
        learner=_build_learner(config, mesh, processing, generator),
        generator=generator,
        init_policy=lambda: Decoder(model, stream_key(config.seed, Stream.POLICY_WEIGHTS)),
        draft_kind=config.rollout.draft.kind,
        init_draft=lambda: build_network(
            config.draft_spec, stream_key(config.seed, Stream.DRAFT_WEIGHTS)
        ),
        add_adapters=(
            (lambda policy: AdaptedDecoder(policy, lora, adapters))
            if lora.rank
            else (lambda policy: policy)
        ),
        online=config.draft_training.online,
        draft_schedule=(
            schedule.train_while_useful
            if config.draft_training.every == "auto"
            else schedule.train_every(config.draft_training.every)
        ),
        compute_advantages=_build_advantages(config),
        kl_in_reward=_build_kl_penalty(config, in_loss=False),
        mini_batches=config.batch.mini_batches,
        uses_dynamic_sampling=config.dynamic_sampling.max_batches > 0,
    )


def _build_advantages(config: ResolvedConfig) -> AdvantageFunction:
    settings = config.advantage
    baseline = {
        "none": advantages.keep_rewards,
        "group": advantages.subtract_group_mean,
        "leave_one_out": advantages.subtract_leave_one_out_mean,
    }[settings.baseline]
    scale = {
        "none": advantages.keep_scale,
        "population": advantages.divide_by_population_std,
        "sample": advantages.divide_by_sample_std,
        "leave_one_out": advantages.divide_by_leave_one_out_std,
        "batch": advantages.divide_by_batch_std,
        "whiten": advantages.whiten_over_tokens,
    }[settings.std]
    group_size = config.batch.group_size
    return partial(
        advantages.compute_advantages, group_size=group_size, baseline=baseline, scale=scale
    )


def _build_policy_loss(config: ResolvedConfig) -> losses.PolicyLoss:
    settings = config.loss
    bounds = dict(zip(("clip_low", "clip_high"), settings.clip_bounds, strict=True))
    clipped = bounds | {"dual_clip": settings.dual_clip}
    surrogate = {
        "clip": partial(losses.ppo_surrogate, **clipped),
        "gspo": partial(losses.gspo_surrogate, **clipped),
        "cispo": partial(losses.cispo_surrogate, **bounds),
        "reinforce": losses.reinforce_surrogate,
    }[settings.kind]
    if settings.function:
        surrogate = _import_loss(settings.function)
    low, high = settings.importance_bounds
    by_sequence = settings.kind == "gspo" and not settings.function
    correction = {
        "none": None,
        "tis": loss_terms.ImportanceWeights(max_weight=high, by_sequence=by_sequence),
        "icepop": loss_terms.ImportanceWeights(low, high, truncate=False, by_sequence=by_sequence),
        "sequence_mask": loss_terms.SequenceMask(low, high),
    }[settings.importance]
    return partial(
        losses.policy_gradient_loss,
        surrogate=surrogate,
        correction=correction,
        kl=_build_kl_penalty(config, in_loss=True),
        entropy_weight=settings.entropy,
    )


def _import_loss(name: str) -> losses.Surrogate:
    """The loss that `loss.function` names, which is tried on shapes.

    Raises:
      ConfigError: it cannot be imported, fails, or gives no loss at each token.
    """
    try:
        function = import_function(name)

        def trace_loss() -> Any:
            zeros = jnp.zeros((2, 3), jnp.float32)
            inputs = dict.fromkeys(loss_terms.LossInputs._fields, zeros)
            inputs |= {"loss_mask": zeros == 0, "text_start": zeros.astype(jnp.int32)}
            loss = function(loss_terms.LossInputs(**inputs))
            return loss.by_label if isinstance(loss, loss_terms.Loss) else jnp.asarray(loss)

        shape = jax.eval_shape(trace_loss).shape
    except Exception as error:  # a user's code raises whatever it likes
        raise ConfigError(f"loss.function {name}: {describe_error(error)}") from error
    require(
        shape == (2, 3),
        f"loss.function {name} gives an array of shape {shape} for tokens of shape (2, 3); give the"
        " loss at each token, and leave their mean to loss.aggregation",
    )

    def surrogate(inputs: loss_terms.LossInputs) -> loss_terms.Loss:
        loss = function(inputs)
        return loss if isinstance(loss, loss_terms.Loss) else loss_terms.Loss(loss)

    return surrogate


def _build_kl_penalty(config: ResolvedConfig, in_loss: bool) -> loss_terms.KlPenalty | None:
    """The penalty, if it is charged there."""
    kl = config.kl
    if not kl.beta or (kl.where == "loss") != in_loss:
        return None
    estimator = loss_terms.ESTIMATORS[kl.active_estimator]
    return loss_terms.KlPenalty(kl.beta, estimator, kl.importance, kl.where == "reward_to_go")


def _build_learner(
    config: ResolvedConfig, mesh: Mesh, processing: Processing, generator: Generator
) -> Learner:
    settings, training = config.optimizer, config.draft_training
    kind = get_kind(config.rollout.draft.kind)
    objective = None
    if kind.learned is not None:
        depths, decay = training.ttt_steps, training.decay
        loss, temperature = LOSSES[training.loss], processing.temperature
        objective = DraftObjective(loss, depths, decay, temperature, kind.learned.unroll)
    batch = config.batch
    steps = config.steps * batch.mini_batches * batch.epochs
    rows = batch.prompts * batch.group_size // batch.mini_batches
    rates, adam = config.learning_rates, settings.adam
    rate = optimizers.warmup_schedule(
        settings.schedule, rates.policy, settings.warmup_steps, steps, adam.schedule_floor
    )
    make_optimizer = {"adamw": optimizers.adamw, "muon": optimizers.muon}[settings.kind]

    def store_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        moment_type = config.optimizer.moments
        return (
            optimizer
            if moment_type == "float32"
            else optimizers.with_state_dtype(moment_type, optimizer)
        )

    b1, b2 = adam.betas
    constants = optimizers.AdamConstants(
        b1, b2, adam.eps, decays_matrices_only=adam.decay == "matrices"
    )
    policy = make_optimizer(rate, settings.grad_clip, settings.weight_decay, constants)
    policy = store_moments(
        optimizers.freeze_weights(("router",), policy) if settings.freeze_router else policy
    )
    memory_kinds = (
        [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
        if config.optimizer.offload
        else [HOST_MEMORY]
    )
    problem = (
        f"optimizer.offload keeps moments in memory of kind {HOST_MEMORY}, and JAX has none for"
        f" these devices, only {', '.join(memory_kinds)}"
    )
    require(
        HOST_MEMORY in memory_kinds,
        f"{problem}; leave it out, and see --optimizer.moments and --lora.rank for less of them",
    )
    return Learner(
        mesh=mesh,
        shard_above=config.mesh.shard_above,
        dtype=config.model.dtype,
        micro_tokens=batch.micro_tokens or default_micro_tokens(config, mesh),
        processing=processing,
        policy_loss=_build_policy_loss(config),
        draft_objective=objective,
        taps=generator.taps,
        policy_optimizer=optimizers.OffloadedOptimizer(*policy)
        if config.optimizer.offload
        else policy,
        draft_optimizer=store_moments(optimizers.adamw(rates.draft, training.grad_clip)),
        aggregation={
            "token": losses.token_mean,
            "sequence": losses.sequence_mean,
            "constant": losses.ConstantDivisor(config.rollout.max_new_tokens, rows),
        }[config.loss.aggregation],
        epochs=batch.epochs,
        keeps_reference=config.kl.beta > 0,
        reads_reference=config.kl.beta > 0 and config.kl.where == "loss",
        learning_rate=rate,
        recompute=config.loss.logprobs == "recompute",
        # where the pass that learns has the old logprobs, or nothing reads them, none are reused
        max_probability_factor=(
            config.loss.reuse_below
            if config.needs_old_logprobs and not config.is_on_policy
            else math.inf
        ),
    )


MICRO_BATCH, MICRO_BATCH_CPU = 16_384, 320
"""Positions of a micro-batch on each data shard, about, where nothing else is said: on an
accelerator as many as keep it busy; on a CPU so few that activations stay in a core's cache
(learning from 32 rows of 192, models of 0.8 and 4.7 M parameters: 1.1 to 1.7 times as fast as with
3,056)."""


def default_micro_tokens(config: ResolvedConfig, mesh: Mesh) -> int:
    """Positions of a micro-batch on each data shard: whole longest rows, and no more than a shard
    has. On accelerators rounded up to whole tiles."""
    longest = config.row_length - 1
    rows = config.batch.prompts * config.batch.group_size // meshes.row_shard_count(mesh)
    target = MICRO_BATCH if meshes.has_accelerators(mesh) else MICRO_BATCH_CPU
    return meshes.round_to_tiles(mesh, longest * min(max(1, round(target / longest)), max(rows, 1)))


PIECE = 128
"""Positions of a piece of known text on an accelerator. A CPU reads whole prompts."""
PAGE, SLOTS = 64, 256
"""Positions of a page on an accelerator, whose kernel reads such pages, and rows that are generated
at once at most, where nothing is said: with a few drafts each, more rows than that are no longer
bound by the reading of weights."""


class AutomaticSizes(NamedTuple):
    """What is chosen by what the devices' memory allows, because the config leaves it open."""

    tokens: bool
    slots: bool = False
    pages: bool = False
    """Of a pool of small pages."""


def automatic_sizes(config: ResolvedConfig, mesh: Mesh) -> AutomaticSizes:
    """What is left open; the engine's sizes follow memory on accelerators only: a CPU has room for
    what it is fast enough for."""
    engine, on_accelerator = config.rollout.engine, meshes.has_accelerators(mesh)
    return AutomaticSizes(
        tokens=config.batch.micro_tokens == 0,
        slots=on_accelerator and engine.slots == "auto",
        pages=on_accelerator and engine.pages == 0 and _page_size(config, mesh) > 0,
    )


def _page_size(config: ResolvedConfig, mesh: Mesh) -> int:
    size = config.rollout.engine.page_size
    if size == "auto":
        return PAGE if meshes.has_accelerators(mesh) else 0
    return size


def _build_generator(
    config: ResolvedConfig, mesh: Mesh, processing: Processing, stop_strings: StopStrings | None
) -> Generator:
    rollout, batch = config.rollout, config.batch
    require(
        meshes.has_accelerators(mesh) or not rollout.engine.command_buffers,
        "rollout.engine.command_buffers puts loops into CUDA graphs, and these devices are CPUs;"
        " leave it out",
    )
    settings = Settings(
        group_size=batch.group_size,
        max_new_tokens=rollout.max_new_tokens,
        processing=processing,
        # coupled: drafts are compared with what the target samples, which no rule decides
        rule={"block": block_rule, "token": token_rule, "coupled": None}[rollout.verify],
        grid=_temperature_factors(config),
        page_size=_page_size(config, mesh),
        chunk=CHUNK_POSITIONS if meshes.has_single_cpu_shards(mesh) else 0,
        pages=rollout.engine.pages,
        piece=PIECE if meshes.has_accelerators(mesh) else 0,
        lengths=draft_lengths(rollout.draft, mesh),
        stop=stop_strings,
        verification=_choose_verification(config, mesh, processing),
    )

    def lay_out(mesh: Mesh, slots: int, length: int) -> tuple[WeightLayout, WeightLayout]:
        """The draft reads what is new at once, and then drafts token by token."""
        shard = (
            mesh.shape[meshes.TENSOR],
            meshes.thread_count() if meshes.has_single_cpu_shards(mesh) else 0,
        )
        policy = fastest_layout(config.model, *shard, ((length + 1) * slots,))
        policy = policy._replace(unrolled=policy.unrolled and not rollout.engine.stack_layers)
        learned_kind = get_kind(rollout.draft.kind).learned
        if learned_kind is None:
            return policy, WeightLayout()
        read_tokens = learned_kind.block_size(length) * slots
        # with one draft a round, reading gives it, and no pass of one token a slot follows
        passes = (read_tokens, slots) if length > 1 else (read_tokens,)
        return policy, fastest_layout(learned_kind.decoder_spec(config.draft_spec), *shard, passes)

    generator = Generator(
        mesh=mesh,
        settings=settings,
        draft=build_draft(config.draft_spec, processing.stop_ids),
        dtype=config.model.dtype,
        seed=config.seed,
        prompt_length=config.data.max_prompt_length,
        past=rollout.past_answers,
        slots=SLOTS if rollout.engine.slots == "auto" else rollout.engine.slots,
        tail=rollout.engine.tail,
        lay_out=lay_out,
        command_buffers=rollout.engine.command_buffers,
        about=repr((config.model, rollout.draft, rollout.lookup, config.head, config.draft_model)),
    )
    return generator.with_(prompts=batch.prompts, group_size=batch.group_size)


def draft_lengths(draft: DraftConfig, mesh: Mesh) -> tuple[int, ...]:
    """Returns the draft lengths among which rounds choose; none where all rounds draft alike."""
    lengths = draft.length_choices if draft.is_enabled else ()
    if not lengths or not meshes.has_accelerators(mesh):
        return lengths
    # Each length is a body to compile for each loop. One token a round pays on no card: its round
    # costs nearly that of three, as both read all weights.
    return tuple(length for length in lengths if length != 1)


def _choose_verification(
    config: ResolvedConfig, mesh: Mesh, processing: Processing
) -> Verification:
    """The fast form on accelerators, where passes over the vocabulary are bound by memory. A CPU
    keeps the plain form and its tokens, and so does the comparison by shared noise."""
    can_fuse = config.rollout.verify != "coupled" and is_supported(processing)
    # Over a vocabulary that `tensor` splits, XLA would gather the logits for its reductions.
    has_full_vocab = mesh.shape[meshes.TENSOR] == 1
    return FUSED if can_fuse and has_full_vocab and meshes.has_accelerators(mesh) else PLAIN


def _temperature_factors(config: ResolvedConfig) -> tuple[float, ...]:
    """Factors on the temperature among which the draft's is chosen."""
    draft = config.rollout.draft
    # The draft's most likely token is what it draws at temperature 0.
    if draft.sampling == "argmax" or config.rollout.temperature == 0 or not draft.is_learned:
        return (0.0,)
    return draft_temperature.GRID if draft.sampling == "auto" else (float(draft.temperature),)
