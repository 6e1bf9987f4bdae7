"""One step: the phases, and their composition into one jittable program; no maths and no callbacks.

`Step.train_step` is rotated by one: it learns from the previous call's rollouts, whose rewards the host has attached, then reshards,
then generates the next. The same phases run one by one with `--staged`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, Num

from jaxspec import mesh as meshes
from jaxspec.config import Config
from jaxspec.drafts.base import Draft
from jaxspec.drafts.build import build_draft, build_network, check_fits, draft_model
from jaxspec.models.arrangement import Arrangement, arranged, best
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.kv import CHUNK
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import ADAPTER_AXES, Adapted, merged
from jaxspec.rl import optim
from jaxspec.rl.advantage import group_advantages
from jaxspec.rl.draft_loss import LOSSES, DraftLoss, Objective, draft_loss
from jaxspec.rl.logprob import learnt_texts, positions_of, response_mask, token_logprobs
from jaxspec.rl.loss import grpo_loss, masked_mean
from jaxspec.rollout import draft_length, draft_temperature
from jaxspec.rollout import generate as engine
from jaxspec.rollout.acceptance import acceptance_metrics, no_statistics
from jaxspec.rollout.round import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import EOS, FAILED, IDLE, LENGTH, Drafter, Finished, Learner, Pace, Prompts, PyTree, Rollout, TrainState
from jaxspec.streams import Stream, stream_key
from jaxspec.sync import cast, to_rollout

Metrics = dict[str, Num[Array, ""]]


SMALLEST_TAIL = 4
"""Slots below which a smaller loop saves nothing that compiling it is worth."""


class Recomputed(NamedTuple):
    """The learner's own pass over a rollout, before the update."""

    tokens: Int[Array, "B S"]
    """What was read, and what the updates read (`learnt_texts`): no text without a reward, nor what only generation's last draw gave."""
    old_logprobs: Float[Array, "B S"]
    entropy: Float[Array, "B S"]
    forward: Forward


@dataclasses.dataclass(frozen=True)
class Step:
    """The fixed parts of a run that its phases share."""

    config: Config
    mesh: Mesh
    settings: Settings
    draft: Draft | None
    policy_optimizer: optax.GradientTransformation
    draft_optimizer: optax.GradientTransformation

    @property
    def draft_length(self) -> int:
        """Tokens drafted a round (K); 0: plain decoding."""
        return self.draft.length if self.draft else 0

    @property
    def arrangements(self) -> tuple[Arrangement, Arrangement]:
        """Of the policy's weights for generation, and of the draft's, which reads what is new at once and then drafts token by token."""
        slots, verified = self.settings.slots, self.draft_length + 1
        read = 2 if self.config.rollout.draft.kind == "model" else verified
        shard = self.mesh.shape[meshes.TENSOR], meshes.threads() if meshes.lone_cpu(self.mesh) else 0
        passes = (read * slots, slots) if self.draft_length > 1 else (read * slots,)
        return best(self.config.model, *shard, (verified * slots,)), best(draft_model(self.config), *shard, passes)

    def plain(self) -> "Step":
        """The same step with plain decoding."""
        return dataclasses.replace(self, draft=None, settings=self.settings._replace(lengths=()))

    def answering(self, prompts: int, group_size: int) -> "Step":
        """The same step with other slots and groups: for `prompts` a call, each with `group_size` answers."""
        rows = prompts * group_size // self.mesh.shape[meshes.DATA]
        options = self.config.rollout.engine
        slots = min(options.slots, rows)
        tail = tuple(size for size in (slots // 4, slots // 16) if size >= SMALLEST_TAIL) if options.tail else ()
        return dataclasses.replace(self, settings=self.settings._replace(group_size=group_size, slots=slots, tail=tail))

    # ---- state

    def start(self, policy: Decoder, network: PyTree) -> TrainState:
        """The state before the first batch, from weights, to which `lora.rank` adds adapters.

        Raises:
          ConfigError: the draft does not fit the policy, or the policy lacks what should have an adapter.
        """
        if network is not None:
            check_fits(network, self.config.model)
        draft = None if network is None else optim.start(network, self.draft_optimizer)
        online = jnp.asarray(self.config.draft_training.online and network is not None)
        measured = draft_temperature.start(self.draft_length, self.settings.grid)
        learner = optim.start(self._trained(policy), self.policy_optimizer)
        size = self.config.data.max_prompt_length + self.settings.max_new_tokens
        pace = draft_length.unmeasured(self.settings.lengths, size) if self.settings.lengths else None
        return TrainState(policy=learner, draft=draft, overlap_by_factor=measured, draft_online=online, pace=pace)

    def fresh(self) -> TrainState:
        """The state with random weights; also gives its shapes, through `jax.eval_shape`."""
        key = stream_key(self.config.seed, Stream.DRAFT_WEIGHTS)
        return self.start(self.fresh_policy(), build_network(self.config, key))

    def fresh_policy(self) -> Decoder:
        """The policy with random weights."""
        return Decoder(self.config.model, stream_key(self.config.seed, Stream.POLICY_WEIGHTS))

    def _trained(self, policy: Decoder) -> Decoder | Adapted:
        """What is trained of the policy: itself, or adapters beside it."""
        if self.config.lora.rank == 0:
            return policy
        return Adapted(policy, self.config.lora, stream_key(self.config.seed, Stream.ADAPTERS))

    def state_shardings(self) -> TrainState:
        """The train layout of everything in the state."""
        return self.train_layout(jax.eval_shape(self.fresh))

    def train_layout(self, tree: PyTree) -> PyTree:
        """Shardings of networks and optimizer states for training."""
        return meshes.shardings(self.mesh, tree, LOGICAL_AXES | ADAPTER_AXES, meshes.TRAIN_RULES, self.config.mesh.shard_above)

    def nothing_finished(self, rows: int) -> Finished:
        """Zeros in the shape of a finished rollout, with nothing to learn."""
        size = self.config.data.max_prompt_length + self.settings.max_new_tokens
        wide = jnp.float64 if self.config.model.dtype == "float64" else jnp.float32
        count = jnp.zeros((rows,), jnp.int32)
        rollout = Rollout(
            tokens=jnp.zeros((rows, size), jnp.int32),
            prompt_lengths=count,
            lengths=count,
            logprobs=jnp.zeros((rows, size), wide),
            status=count,
            statistics=no_statistics(rows, self.settings.group_size, self.draft_length, len(self.settings.grid), wide),
        )
        off = jnp.zeros((rows,), bool)
        return Finished(rollout=rollout, rewards=jnp.zeros((rows,), jnp.float32), valid=off, learn=jnp.zeros((), bool))

    # ---- phases

    @jax.named_scope("sync")
    def prepare(self, state: TrainState) -> tuple[Decoder, Drafter]:
        """Policy, with its adapters merged, and draft in the rollout layout, arrangement and type."""
        networks = merged(state.policy.network), state.draft.network if state.draft else None
        networks = to_rollout(networks, self.mesh, LOGICAL_AXES, jnp.dtype(self.config.model.dtype))
        policy, network = map(arranged, networks, self.arrangements)
        choice = draft_temperature.choose(state.overlap_by_factor, self.settings.grid)
        return policy, Drafter(network=network, choice=choice, pace=state.pace)

    def key(self, prompts: Prompts) -> Key[Array, ""]:
        """All noise of a call comes from here: (seed, stream, batch)."""
        return stream_key(self.config.seed, prompts.stream, prompts.batch)

    @jax.named_scope("generate")
    def generate(self, target: Decoder, drafter: Drafter, prompts: Prompts) -> Rollout:
        """Answers every prompt."""
        return engine.generate(target, drafter, self.draft, prompts, self.key(prompts), self.settings, self.mesh)

    @jax.named_scope("generate")
    def begin(self, target: Decoder, drafter: Drafter, prompts: Prompts) -> engine.Engine:
        """Prefills, for generation in slices."""
        return engine.begin_sharded(target, drafter, self.draft, prompts, self.key(prompts), self.settings, self.mesh)

    @jax.named_scope("generate")
    def advance(self, target: Decoder, drafter: Drafter, running: engine.Engine, max_rounds: Int[Array, ""]) -> engine.Engine:
        """One slice of generation."""
        return engine.advance_sharded(target, drafter, self.draft, running, max_rounds, self.settings, self.mesh)

    def measure(self, rollout: Rollout, drafter: Drafter) -> Metrics:
        """Lengths, endings and acceptance of the rows that were generated."""
        ran = rollout.status != IDLE
        rows = jnp.maximum(jnp.sum(ran), 1)
        tokens = jnp.sum(jnp.where(ran, rollout.lengths - rollout.prompt_lengths, 0))
        return {
            "rollout/tokens": tokens,
            "rollout/rounds": jnp.sum(rollout.statistics.rounds) / rows,
            "rollout/length_mean": tokens / rows,
            **acceptance_metrics(rollout.statistics, tokens, drafter.choice, self.settings.grid),
            **{f"status/{name}": jnp.sum(rollout.status == code) for name, code in (("eos", EOS), ("length", LENGTH), ("failed", FAILED))},
        }

    @jax.named_scope("logprob")
    def logprob(self, state: TrainState, finished: Finished) -> Recomputed:
        """The learner's pass before the update: old logprobs, and taps for the draft's own training."""
        policy = cast(merged(state.policy.network), jnp.dtype(self.config.model.dtype))
        rollout = finished.rollout
        tokens = learnt_texts(rollout.tokens, _learnt(finished))
        forward = policy(tokens, positions_of(tokens), taps=self.draft.taps if self.draft else ())
        old_logprobs, entropy = token_logprobs(policy, forward.hidden, rollout.tokens, rollout.prompt_lengths, self.settings.processing)
        return Recomputed(tokens, old_logprobs, entropy, forward)

    @jax.named_scope("train")
    def train_policy(self, policy: Learner, finished: Finished, recomputed: Recomputed) -> tuple[Learner, Metrics]:
        """One GRPO update; nothing of the draft enters it. Where no row has a reward it is skipped, and counted as not finite."""
        rollout, tokens, mask = finished.rollout, recomputed.tokens, _learnt(finished)
        advantages = group_advantages(finished.rewards.astype(recomputed.old_logprobs.dtype), finished.valid, self.settings.group_size)

        def loss_of(trained: Decoder | Adapted) -> Float[Array, ""]:
            network = cast(merged(trained), jnp.dtype(self.config.model.dtype))
            forward = network(tokens, positions_of(tokens))
            logprobs, _ = token_logprobs(network, forward.hidden, rollout.tokens, rollout.prompt_lengths, self.settings.processing)
            return grpo_loss(logprobs, recomputed.old_logprobs, advantages, mask)

        loss, gradients = optim.value_and_grad(loss_of, policy.network)
        loss = jnp.where(jnp.any(mask), loss, jnp.nan)
        policy, norm = optim.update(policy, gradients, loss, self.policy_optimizer)
        gap = jnp.abs(rollout.logprobs - recomputed.old_logprobs)
        return policy, {
            "loss/policy": loss,
            "grad_norm/policy": norm,
            "entropy": masked_mean(recomputed.entropy, mask),
            "rollout/logprob_gap_mean": masked_mean(gap, mask),
            "rollout/logprob_gap_max": jnp.max(jnp.where(mask, gap, 0)),
            "skipped/policy": policy.skipped,
            "skipped_in_row/policy": policy.skipped_in_row,
        }

    def train_draft(
        self, draft: Learner, policy: Decoder, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"], forward: Forward
    ) -> tuple[Learner, Metrics]:
        """One update of the draft on the policy's detached hidden states, with its own optimizer and clip.

        Where `mask` has nothing it is skipped, and counted as not finite.
        """

        def loss_of(network: PyTree) -> tuple[Float[Array, ""], Float[Array, " A"]]:
            result = self.draft_loss(network, policy, tokens, mask, forward, self.config.draft_training.ttt_steps)
            return result.loss, result.acceptance

        (loss, acceptance), gradients = optim.value_and_grad(loss_of, draft.network, has_aux=True)
        loss = jnp.where(jnp.any(mask), loss, jnp.nan)
        draft, norm = optim.update(draft, gradients, loss, self.draft_optimizer)
        depths = {f"draft/expected_acceptance_{depth}": value for depth, value in enumerate(acceptance, start=1)}
        skipped = {"skipped/draft": draft.skipped, "skipped_in_row/draft": draft.skipped_in_row}
        return draft, {"loss/draft": loss, "grad_norm/draft": norm, **depths, **skipped}

    def draft_loss(
        self, network: PyTree, policy: Decoder, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"], forward: Forward, depths: int
    ) -> DraftLoss:
        """The draft's loss and acceptance at `depths` depths over the tokens of `mask`, in the type of the rollout."""
        options, dtype = self.config.draft_training, jnp.dtype(self.config.model.dtype)
        objective = Objective(LOSSES[options.loss], depths, options.decay, self.settings.processing.temperature)
        return draft_loss(cast(network, dtype), cast(policy, dtype), forward, tokens, mask, objective)

    def train(self, state: TrainState, finished: Finished, recomputed: Recomputed) -> tuple[TrainState, Metrics]:
        """Policy update, then draft update; both from the weights that `recomputed` was made with."""
        policy, metrics = self.train_policy(state.policy, finished, recomputed)
        # Always true, but it makes the draft wait for the policy's gradients: two collectives at once can starve a CPU's few threads.
        gradients_done = ~(metrics["grad_norm/policy"] < -1)
        waiting = state.replace(draft_online=state.draft_online & gradients_done)
        draft, draft_metrics = self.maybe_train_draft(waiting, finished, recomputed)
        measured, pace = self.tune(state.overlap_by_factor, state.pace, finished)
        return state.replace(policy=policy, draft=draft, overlap_by_factor=measured, pace=pace), metrics | draft_metrics

    def tune(self, measured: Float[Array, "K F"], pace: Pace | None, finished: Finished) -> tuple[Float[Array, "K F"], Pace | None]:
        """What the rollout measured about the draft's temperature and acceptance, for the next ones."""
        statistics = finished.rollout.statistics
        return draft_temperature.update(measured, statistics), None if pace is None else draft_length.update(pace, statistics)

    @jax.named_scope("train_draft")
    def maybe_train_draft(self, state: TrainState, finished: Finished, recomputed: Recomputed) -> tuple[Learner | None, Metrics]:
        """The draft update where the draft learns online; its metrics are NaN where it is frozen."""
        if state.draft is None:
            return None, {}

        mask = _learnt(finished)

        def update(draft: Learner) -> tuple[Learner, Metrics]:
            return self.train_draft(draft, merged(state.policy.network), recomputed.tokens, mask, recomputed.forward)

        return jax.lax.cond(state.draft_online, update, lambda draft: (draft, _nothing(update, draft)), state.draft)

    # ---- the whole step

    def learn(self, state: TrainState, finished: Finished) -> tuple[TrainState, Metrics]:
        """Logprob recompute and both updates, when there is something to learn."""

        def learn(state: TrainState) -> tuple[TrainState, Metrics]:
            return self.train(state, finished, self.logprob(state, finished))

        return jax.lax.cond(finished.learn, learn, lambda state: (state, _nothing(learn, state)), state)

    def train_step(self, state: TrainState, finished: Finished, prompts: Prompts) -> tuple[TrainState, Rollout, Metrics, Metrics]:
        """Learns from `finished`, syncs, generates the next rollout; returns it with the metrics of both."""
        with jax.named_scope("learn"):
            state, learn_metrics = self.learn(state, finished)
        target, drafter = self.prepare(state)
        rollout = self.generate(target, drafter, prompts)
        return state, rollout, learn_metrics, self.measure(rollout, drafter)


def _learnt(finished: Finished) -> Bool[Array, "B S"]:
    """The tokens that are learnt from: those of responses that have a reward."""
    return response_mask(finished.rollout) & finished.valid[:, None]


def _nothing(function, *arguments) -> Metrics:
    """Metrics of a branch that did not run: NaN, and 0 for counts."""
    shapes = jax.eval_shape(function, *arguments)[1]
    return {
        name: jnp.full(leaf.shape, jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 0, leaf.dtype) for name, leaf in shapes.items()
    }


def build_step(config: Config, mesh: Mesh, stop_ids: tuple[int, ...], known: int) -> Step:
    """Opens the config once and hands its parts to those who use them; of the vocabulary, ids below `known` have a token."""
    rollout, grpo, training = config.rollout, config.grpo, config.draft_training
    processing = Processing(
        banned=rollout.banned,
        min_new_tokens=rollout.min_new_tokens,
        stop_ids=stop_ids,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        known=known,
    )
    settings = Settings(
        group_size=grpo.group_size,
        max_new_tokens=rollout.max_new_tokens,
        processing=processing,
        rule={"block": block_rule, "token": token_rule, "coupled": None}[rollout.verify],
        grid=_grid(config),
        page_size=rollout.engine.page_size,
        chunk=CHUNK if meshes.lone_cpu(mesh) else 0,
        pages=rollout.engine.pages,
        lengths=rollout.draft.lengths if rollout.draft.kind != "none" else (),
    )
    step = Step(
        config=config,
        mesh=mesh,
        settings=settings,
        draft=build_draft(config, stop_ids),
        policy_optimizer=optim.adamw(optim.warmup(grpo.learning_rate, grpo.warmup_steps), grpo.grad_clip, grpo.weight_decay),
        draft_optimizer=optim.adamw(training.learning_rate, training.grad_clip),
    )
    return step.answering(grpo.prompts, grpo.group_size)


def _grid(config: Config) -> tuple[float, ...]:
    """Factors on the temperature among which the draft's is chosen."""
    draft = config.rollout.draft
    if draft.sampling == "argmax" or config.rollout.temperature == 0 or not draft.learned:
        return (0.0,)
    return draft_temperature.GRID if draft.sampling == "auto" else (float(draft.temperature),)
