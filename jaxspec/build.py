"""Builds a step from a config: learner and generator, with losses, optimizers and sizes."""

import math
from functools import partial
from typing import NamedTuple

import optax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.config.settings import DraftConfig, OptimizerConfig, ResolvedConfig
from jaxspec.drafts import draft_temperature, schedule
from jaxspec.drafts.kinds import build_draft, build_network, get_kind
from jaxspec.inputs.checked import require
from jaxspec.inputs.streams import Stream, stream_key
from jaxspec.kernels.key_chunks import CHUNK_POSITIONS
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder
from jaxspec.models.weight_layout import WeightLayout, fastest_layout
from jaxspec.processes.devices import thread_count
from jaxspec.rl import advantages, loss_terms, losses, optimizers
from jaxspec.rl.draft_objective import LOSSES, DraftObjective, UntrainedDraft
from jaxspec.rl.learner import Learner
from jaxspec.rl.objective import PolicyObjective
from jaxspec.rollout.generator import Generator
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Verification
from jaxspec.rollout.verification.fused import FUSED, is_supported
from jaxspec.rollout.verification.modes import Matching, Rejection, VerificationMode
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.step import HOST_MEMORY, Step
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS, StopStrings


def build_step(
    config: ResolvedConfig,
    mesh: Mesh,
    stop_ids: tuple[int, ...],
    vocab_size: int,
    stop_strings: StopStrings = NO_STOP_STRINGS,
) -> Step:
    """Builds the step of a config on a mesh.

    Token ids from `vocab_size` on are never sampled. `stop_strings` detects `rollout.stop`.

    Raises:
      ConfigError: the devices lack something that it needs, or `loss.function` cannot be used.
    """
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
        advantages=_build_advantages(config),
        kl_in_reward=(
            _build_kl_penalty(config) if config.kl.beta and config.kl.where != "loss" else None
        ),
        mini_batches=config.batch.mini_batches,
        uses_dynamic_sampling=config.dynamic_sampling.max_batches > 0,
    )


def _build_advantages(config: ResolvedConfig) -> advantages.AdvantageEstimator:
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
    return advantages.AdvantageEstimator(config.batch.group_size, baseline, scale)


def _build_policy_loss(config: ResolvedConfig) -> losses.PolicyLoss:
    settings = config.resolved_loss
    bounds = dict(zip(("clip_low", "clip_high"), settings.clip_bounds, strict=True))
    clipped = bounds | {"dual_clip": settings.dual_clip}
    surrogate = {
        "clip": partial(losses.ppo_surrogate, **clipped),
        "gspo": partial(losses.gspo_surrogate, **clipped),
        "cispo": partial(losses.cispo_surrogate, **bounds),
        "reinforce": losses.reinforce_surrogate,
    }[settings.kind]
    if settings.function:
        surrogate = losses.import_surrogate(settings.function)
    low, high = settings.importance_bounds
    # GSPO weighs whole sequences. A user's function that replaces it weighs tokens.
    by_sequence = settings.kind == "gspo" and not settings.function
    correction = {
        "none": loss_terms.keep_weights,
        "tis": loss_terms.ImportanceWeights(max_weight=high, by_sequence=by_sequence),
        "icepop": loss_terms.ImportanceWeights(low, high, truncate=False, by_sequence=by_sequence),
        "sequence_mask": loss_terms.SequenceMask(low, high),
    }[settings.importance]
    return partial(
        losses.policy_gradient_loss,
        surrogate=surrogate,
        correction=correction,
        terms=_build_loss_terms(config),
    )


def _build_loss_terms(config: ResolvedConfig) -> tuple[loss_terms.LossTerm, ...]:
    """Builds the terms that are added to the surrogate loss."""
    terms: list[loss_terms.LossTerm] = []
    if config.kl.beta and config.kl.where == "loss":
        terms.append(_build_kl_penalty(config))
    if config.loss.entropy:
        terms.append(loss_terms.EntropyBonus(config.loss.entropy))
    return tuple(terms)


def _build_kl_penalty(config: ResolvedConfig) -> loss_terms.KlPenalty:
    kl = config.kl
    estimator = loss_terms.ESTIMATORS[kl.active_estimator]
    return loss_terms.KlPenalty(kl.beta, estimator, kl.importance, kl.where == "reward_to_go")


def _build_learner(
    config: ResolvedConfig, mesh: Mesh, processing: Processing, generator: Generator
) -> Learner:
    settings, batch, rates = config.optimizer, config.batch, config.learning_rates
    # The optimizer counts updates, of which a batch has several.
    steps = config.steps * batch.mini_batches * batch.epochs
    rate = optimizers.warmup_schedule(
        settings.schedule, rates.policy, settings.warmup_steps, steps, settings.adam.schedule_floor
    )
    policy_optimizer = _build_policy_optimizer(settings, rate, mesh)
    draft_optimizer = optimizers.adamw(rates.draft, config.draft_training.grad_clip)
    return Learner(
        mesh=mesh,
        shard_above=config.mesh.shard_above,
        dtype=config.model.dtype,
        micro_tokens=batch.micro_tokens or default_micro_tokens(config, mesh),
        processing=processing,
        policy_objective=_build_policy_objective(config),
        draft_objective=_build_draft_objective(config, processing.temperature),
        taps=generator.taps,
        policy_optimizer=policy_optimizer,
        draft_optimizer=_store_moments(settings.moments, draft_optimizer),
        epochs=batch.epochs,
        keeps_reference=config.kl.beta > 0,
        reads_reference=config.kl.beta > 0 and config.kl.where == "loss",
        learning_rate=rate,
        recompute=config.resolved_loss.logprobs == "recompute",
        # No limit if nothing reads old logprobs, or if the learning pass computes them itself.
        max_probability_factor=(
            config.loss.reuse_below
            if config.needs_old_logprobs and not config.is_on_policy
            else math.inf
        ),
        seed=config.seed,
    )


def _build_policy_objective(config: ResolvedConfig) -> PolicyObjective:
    batch = config.batch
    rows = batch.prompts * batch.group_size // batch.mini_batches
    aggregation = {
        "token": losses.token_mean,
        "sequence": losses.sequence_mean,
        "constant": losses.ConstantDivisor(config.rollout.max_new_tokens, rows),
    }[config.loss.aggregation]
    return PolicyObjective(_build_policy_loss(config), aggregation)


def _build_draft_objective(
    config: ResolvedConfig, temperature: float
) -> DraftObjective | UntrainedDraft:
    learned_kind, training = get_kind(config.rollout.draft.kind).learned, config.draft_training
    if learned_kind is None:
        return UntrainedDraft()
    loss, depths, decay = LOSSES[training.loss], training.ttt_steps, training.decay
    return DraftObjective(loss, depths, decay, temperature, learned_kind.unroll)


def _build_policy_optimizer(
    settings: OptimizerConfig, rate: optax.Schedule, mesh: Mesh
) -> optax.GradientTransformation:
    """Builds the optimizer of the policy.

    Raises:
      ConfigError: moments are to be offloaded, and the devices have no such memory.
    """
    make_optimizer = {"adamw": optimizers.adamw, "muon": optimizers.muon}[settings.kind]
    adam = settings.adam
    b1, b2 = adam.betas
    constants = optimizers.AdamConstants(
        b1, b2, adam.eps, decays_matrices_only=adam.decay == "matrices"
    )
    policy = make_optimizer(rate, settings.grad_clip, settings.weight_decay, constants)
    policy = _store_moments(
        settings.moments,
        optimizers.freeze_weights(("router",), policy) if settings.freeze_router else policy,
    )
    if not settings.offload:
        return policy
    memory_kinds = [memory.kind for memory in mesh.devices.flat[0].addressable_memories()]
    problem = (
        f"optimizer.offload keeps moments in memory of kind {HOST_MEMORY}, and JAX has none for"
        f" these devices, only {', '.join(memory_kinds)}"
    )
    require(
        HOST_MEMORY in memory_kinds,
        f"{problem}; leave it out, and see --optimizer.moments and --lora.rank for less of them",
    )
    return optimizers.OffloadedOptimizer(*policy)


def _store_moments(
    dtype: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Returns an optimizer that stores its moments in `dtype`."""
    return optimizer if dtype == "float32" else optimizers.with_state_dtype(dtype, optimizer)


# An accelerator needs many tokens to be busy. On a CPU, activations should stay in a core's cache:
# 320 made learning 1.1 to 1.7 times as fast as 3,056 (0.8 and 4.7 M parameters, 32 rows of 192).
MICRO_BATCH, MICRO_BATCH_CPU = 16_384, 320
"""Default tokens of a micro-batch on each data shard, approximately: on accelerators, on CPUs."""


def default_micro_tokens(config: ResolvedConfig, mesh: Mesh) -> int:
    """Returns the default tokens of a micro-batch: full rows, rounded up to tiles."""
    longest = config.row_length - 1  # the last token of a row is only a label
    rows = config.batch.prompts * config.batch.group_size // meshes.row_shard_count(mesh)
    target = MICRO_BATCH if meshes.has_accelerators(mesh) else MICRO_BATCH_CPU
    return meshes.round_to_tiles(mesh, longest * min(max(1, round(target / longest)), max(rows, 1)))


PIECE = 128
"""Positions of a piece of known text on accelerators. CPUs read each prompt at once."""
# The kernel on GPUs reads pages of this size. With a few drafts each, more rows than SLOTS make a
# round bound by compute, and no longer by reading weights.
PAGE, SLOTS = 64, 256
"""Default positions of a page on accelerators, and default maximum of slots."""


class AutomaticSizes(NamedTuple):
    """Flags of the sizes that are chosen by device memory."""

    tokens: bool
    """Tokens of a micro-batch."""
    slots: bool = False
    pages: bool = False


def automatic_sizes(config: ResolvedConfig, mesh: Mesh) -> AutomaticSizes:
    """Returns which sizes the config leaves open."""
    # A CPU runs out of time before memory, so slots and pages are chosen on accelerators only.
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


_VERIFICATION_MODES: dict[str, VerificationMode] = {
    "block": Rejection(block_rule),
    "token": Rejection(token_rule),
    "coupled": Matching(),
}


def _build_generator(
    config: ResolvedConfig, mesh: Mesh, processing: Processing, stop_strings: StopStrings
) -> Generator:
    rollout, batch = config.rollout, config.batch
    require(
        meshes.has_accelerators(mesh) or not rollout.engine.command_buffers,
        "rollout.engine.command_buffers puts loops into CUDA graphs, and these devices are CPUs;"
        " leave it out",
    )
    mode = _VERIFICATION_MODES[rollout.verify]
    draft = build_draft(config.draft_spec, processing.stop_ids, config.lookup_spec)
    grid = _temperature_factors(config)
    settings = Settings(
        group_size=batch.group_size,
        max_new_tokens=rollout.max_new_tokens,
        processing=processing,
        mode=mode.for_draft(draft, grid),
        grid=grid,
        page_size=_page_size(config, mesh),
        chunk=CHUNK_POSITIONS if meshes.has_single_cpu_shards(mesh) else 0,
        pages=rollout.engine.pages,
        piece=PIECE if meshes.has_accelerators(mesh) else 0,
        lengths=draft_lengths(rollout.draft, mesh),
        stop=stop_strings,
        verification=_choose_verification(config, mesh, processing),
    )

    def choose_layouts(mesh: Mesh, slots: int, length: int) -> tuple[WeightLayout, WeightLayout]:
        """Chooses the layouts of policy and draft."""
        threads = thread_count() if meshes.has_single_cpu_shards(mesh) else 0
        shard = mesh.shape[meshes.TENSOR], threads
        policy = fastest_layout(config.model, *shard, ((length + 1) * slots,))
        policy = policy._replace(unrolled=policy.unrolled and not rollout.engine.stack_layers)
        learned_kind = get_kind(rollout.draft.kind).learned
        if learned_kind is None:
            return policy, WeightLayout()
        # A draft first reads all new tokens of its slots in one pass, which gives its first token.
        read_tokens = learned_kind.block_size(length) * slots
        # Each of its other tokens takes a pass.
        passes = (read_tokens, slots) if length > 1 else (read_tokens,)
        return policy, fastest_layout(learned_kind.decoder_spec(config.draft_spec), *shard, passes)

    generator = Generator(
        mesh=mesh,
        settings=settings,
        draft=draft,
        mode=mode,
        dtype=config.model.dtype,
        seed=config.seed,
        prompt_length=config.data.max_prompt_length,
        past_answers=rollout.past_answers,
        slots=SLOTS if rollout.engine.slots == "auto" else rollout.engine.slots,
        uses_tail=rollout.engine.tail,
        make_layouts=choose_layouts,
        command_buffers=rollout.engine.command_buffers,
        description=repr(
            (config.model, rollout.draft, rollout.lookup, config.head, config.draft_model)
        ),
    )
    return generator.make_variant(prompts=batch.prompts, group_size=batch.group_size)


def draft_lengths(draft: DraftConfig, mesh: Mesh) -> tuple[int, ...]:
    """Returns the draft lengths that rounds choose from, or no length if there is no choice."""
    lengths = draft.length_choices if draft.is_enabled else ()
    if not lengths or not meshes.has_accelerators(mesh):
        return lengths
    # Each length is compiled for each loop. Length 1 pays on no card: its rounds cost nearly as
    # much as those of length 3, since both read all weights.
    return tuple(length for length in lengths if length != 1)


def _choose_verification(
    config: ResolvedConfig, mesh: Mesh, processing: Processing
) -> Verification:
    """Chooses the fused form where it is supported and faster, otherwise the plain form."""
    # On accelerators, memory bounds passes over the vocabulary, and the fused form makes fewer. On
    # CPUs, tokens stay those of the plain form. "coupled" needs noise of the full vocabulary.
    can_fuse = config.rollout.verify != "coupled" and is_supported(processing)
    # Over a vocabulary that `tensor` splits, XLA would gather the logits for its reductions.
    has_full_vocab = mesh.shape[meshes.TENSOR] == 1
    return FUSED if can_fuse and has_full_vocab and meshes.has_accelerators(mesh) else PLAIN


def _temperature_factors(config: ResolvedConfig) -> tuple[float, ...]:
    """Returns the factors for the draft's temperature."""
    draft = config.rollout.draft
    # At temperature 0, the draft's most likely token is its only one.
    if draft.sampling == "argmax" or config.rollout.temperature == 0 or not draft.is_learned:
        return (0.0,)
    return draft_temperature.GRID if draft.sampling == "auto" else (float(draft.temperature),)
