"""Offline training of the draft on the policy's own responses: `python -m jaxspec.train_draft --config draft_offline.py`."""

import dataclasses
import hashlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.checkpoint import cached, content_key, load_tree, save_tree
from jaxspec.config import ConfigError
from jaxspec.data import Problem, PromptStream, load_problems, pad_prompts
from jaxspec.interrupt import Interrupt
from jaxspec.metrics import Progress
from jaxspec.models.decoder import Decoder
from jaxspec.program import Job, in_process_0, on_this_process, process_0_first, run, sources
from jaxspec.rl import optim
from jaxspec.runner import abstract
from jaxspec.state import IDLE, Learner, Prompts, PyTree, Rollout
from jaxspec.step import Metrics, Step, build_step
from jaxspec.train_sft import WEIGHTS, cached_policy, policy_key

STREAM = 2
"""Key stream of these rollouts, apart from training's and evaluation's."""


def sample_responses(job: Job, policy: Decoder, progress: Progress) -> list[Rollout]:
    """The policy's own responses to the training prompts, by plain decoding: in domain, the largest single lever on acceptance."""
    config, rows = job.config, job.config.offline.rows
    plain = plain_step(job)
    plain = dataclasses.replace(plain, settings=plain.settings._replace(group_size=1))
    problems, _ = load_problems(config.data, job.tokenizer)
    stream = PromptStream(problems, config.seed)

    def generate(policy: Decoder, prompts: Prompts) -> Rollout:
        target, _ = plain.prepare(plain.start(policy, None))
        return plain.generate(target, None, prompts)

    call = jax.jit(generate)
    rollouts = []
    for number in range(-(-config.offline.samples // rows)):
        chosen = [stream[number * rows + row] for row in range(rows)]
        rollouts.append(call(policy, _prompts(job, chosen, number)))
        progress.update(min((number + 1) * rows, config.offline.samples))
    return rollouts


def train(job: Job, policy: Decoder, rollouts: list[Rollout], progress: Progress) -> PyTree:
    """Trains a fresh draft for `offline.steps` updates on batches of `rollouts`, in an order of each pass's own; returns its weights."""
    config = job.config
    optimizer = optim.adamw(optim.cosine(config.offline.learning_rate, config.offline.steps), config.rollout.draft.grad_clip)
    step = dataclasses.replace(job.step, draft_optimizer=optimizer)

    def fresh() -> Learner:
        learner = step.fresh().draft
        assert learner is not None, "train is only called for a draft with weights"
        return learner

    def update(draft: Learner, policy: Decoder, rollout: Rollout) -> tuple[Learner, Metrics]:
        state = step.start(policy, draft.network)
        return step.train_draft(draft, policy, rollout, rollout.status != IDLE, step.logprob(state, rollout).forward)

    layout = job.step.train_layout(jax.eval_shape(fresh))
    draft = jax.jit(fresh, out_shardings=layout)()
    call = jax.jit(update, donate_argnums=0)
    rng = np.random.default_rng([config.seed, 2])
    order: list[int] = []
    for number in range(1, config.offline.steps + 1):
        order = order or list(rng.permutation(len(rollouts)))
        draft, metrics = call(draft, policy, rollouts[order.pop()])
        progress.update(number, loss=float(metrics["loss/draft"]), expected_acceptance_length=expected_length(metrics))
    return draft.network


def expected_length(metrics: Metrics) -> float:
    """Tokens a round would keep if each depth were accepted with its mean overlap: 1 + a1 + a1 a2 + ..."""
    by_depth = [float(value) for name, value in sorted(metrics.items()) if name.startswith("draft/expected_acceptance_")]
    return 1 + float(np.sum(np.cumprod(by_depth)))


def plain_step(job: Job) -> Step:
    """The same step with plain decoding."""
    rollout = dataclasses.replace(job.config.rollout, draft=dataclasses.replace(job.config.rollout.draft, kind="none"))
    return build_step(dataclasses.replace(job.config, rollout=rollout), job.mesh, job.tokenizer.stop_ids)


def _prompts(job: Job, problems: list[Problem], number: int) -> Prompts:
    tokens, lengths = pad_prompts(problems, job.config.data.max_prompt_length, job.tokenizer.pad_id)
    tokens, lengths, live = jax.device_put((tokens, lengths, np.ones(len(problems), bool)), meshes.rows_sharding(job.mesh))
    return Prompts(tokens=tokens, lengths=lengths, live=live, stream=jnp.int32(STREAM), batch=jnp.int32(number))


def cached_draft(job: Job, interrupt: Interrupt) -> Path:
    """The file of the draft's weights, trained first if the cache does not hold it; in process 0, which does it for all.

    Raises:
      ConfigError: the cache cannot be written, or is not shared with process 0.
    """
    config = job.config
    code = sources(
        "train_draft.py", "step.py", "data.py", "sampling.py", "drafts/*.py", "rollout/*.py", "rl/draft_loss.py", "rl/logprob.py"
    )
    data = dataclasses.replace(config.data, path=_digest(config.data.path), tokenizer=_digest(config.data.tokenizer, "tokenizer.json"))
    draft, rollout = config.rollout.draft, config.rollout
    shape = draft.kind, draft.ttt_steps, draft.decay, draft.grad_clip, rollout.max_new_tokens, rollout.temperature

    def build(folder: Path) -> None:
        job.say(f"no draft in the cache: sampling {config.offline.samples} responses, then {config.offline.steps} steps of {draft.kind}")
        began, local = time.perf_counter(), on_this_process(job)
        policy = load_policy(local, interrupt)
        with Progress("sampling", config.offline.samples) as progress, interrupt.nothing_unsaved("sampling", progress.stop):
            rollouts = sample_responses(local, policy, progress)
        with Progress("draft", config.offline.steps) as progress, interrupt.nothing_unsaved("training the draft", progress.stop):
            save_tree(folder / WEIGHTS, train(local, policy, rollouts, progress))
        job.say(f"the draft took {time.perf_counter() - began:.0f} s")

    with interrupt.nothing_unsaved("looking for the draft"):
        return (
            cached(content_key("draft", policy_key(job), config.seed, shape, config.offline, data, code), in_process_0(build), job.say)
            / WEIGHTS
        )


def _digest(*path: str) -> str:
    """The content of a file, as far as a cache key goes; empty where no file is set."""
    return hashlib.sha256(Path(*path).read_bytes()).hexdigest() if path[0] else ""


def load_policy(job: Job, interrupt: Interrupt) -> Decoder:
    """The starting policy on the job's mesh: the warm start, or random weights where `sft.steps` is 0."""
    shapes = abstract(job.step, job.config.grpo.prompts)[0].policy.network
    if job.config.sft.steps == 0:
        return jax.jit(lambda: job.step.fresh().policy.network, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))()
    return load_tree(cached_policy(job, interrupt), shapes)


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains the draft, or finds it in the cache, and says where it is."""
    if job.config.offline.steps == 0 or job.config.rollout.draft.kind == "none":
        raise ConfigError("offline.steps is 0 or rollout.draft.kind is none, so there is nothing to train; set --offline.steps and a draft")
    load_problems(job.config.data, job.tokenizer)  # bad data is named before any work
    job.say(f"draft: {process_0_first(lambda: cached_draft(job, interrupt))}")
    return 0


if __name__ == "__main__":
    sys.exit(run("train_draft", "Samples the policy on the training prompts and trains the draft on its responses.", main))
