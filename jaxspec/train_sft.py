"""Supervised warm start of the embedded model, on generated documents: `python -m jaxspec.train_sft --config rl_think.py`."""

import sys

if __name__ == "__main__":  # a stop while the rest is imported, which takes seconds, has nothing to save
    from jaxspec.begin import begin

    begin()

import dataclasses
import time
from pathlib import Path

import jax

from jaxspec import mesh as meshes
from jaxspec import tasks
from jaxspec.cache import cached, content_key, save_tree
from jaxspec.config import ConfigError
from jaxspec.draft_data import answered
from jaxspec.interrupt import Interrupt
from jaxspec.metrics import Progress
from jaxspec.models.decoder import Decoder
from jaxspec.program import Job, in_process_0, on_this_process, process_0_first, run, sources
from jaxspec.rl import optimizers
from jaxspec.rl.losses import negative_log_likelihood
from jaxspec.rl.train_batch import texts_to_learn
from jaxspec.sampling import Processing
from jaxspec.state import LearnerState
from jaxspec.streams import Stream, stream_rng
from jaxspec.unused import OF_POLICY

WEIGHTS = "weights.npz"


def warm_start(job: Job, progress: Progress) -> Decoder:
    """Trains a fresh policy for `sft.steps` updates; the data and the noise follow from the seed alone.

    It learns as in RL: what follows each document's prompt, by the negative log-likelihood of each token.
    """
    config = job.config
    sft, mesh = config.sft, job.mesh
    rng = stream_rng(config.seed, Stream.DOCUMENTS)
    length = config.data.max_prompt_length + config.rollout.max_new_tokens
    learner = dataclasses.replace(
        job.step.learner,
        tokens=max(length - 1, min(sft.rows // mesh.shape[meshes.DATA] * (length - 1), job.step.learner.tokens)),
        processing=Processing(),
        policy_loss=negative_log_likelihood,
        objective=None,
        taps=(),
        policy_optimizer=optimizers.adamw(optimizers.cosine(sft.learning_rate, sft.steps), grad_clip=1.0, weight_decay=0.01),
    )

    def fresh() -> LearnerState:
        return learner.start(job.step.fresh_policy(), None, online=False)

    layout = learner.layout(jax.eval_shape(fresh))
    state = jax.jit(fresh, out_shardings=layout)()
    update = jax.jit(learner.learn, donate_argnums=0, out_shardings=(layout, meshes.replicated(mesh)))
    for number in range(1, sft.steps + 1):
        texts = answered(tasks.sample_sft_batch(config.data, sft.wrong_steps, job.tokenizer, rng, sft.rows, length))
        state, metrics = update(state, texts_to_learn(*texts, mesh, learner.tokens))
        progress.update(number, loss=float(metrics["loss/policy"]))
        skipped = int(metrics["skipped_in_row/policy"])
        optimizers.require_progress(skipped, "policy", f"step {number} of the warm start", "Lower --sft.learning_rate.")
    return state.policy.network


def policy_key(job: Job) -> str:
    """Names the warm start by all that shapes it."""
    config = job.config
    shape = config.data.task, config.data.digits, config.data.format, config.data.max_prompt_length, config.rollout.max_new_tokens
    code = sources("tasks.py", "tokenizer.py", "train_sft.py", "streams.py", "models/*.py", "kernels/*.py", "rl/*.py")
    return content_key("policy", config.seed, config.model, config.sft, shape, code)


def cached_policy(job: Job, interrupt: Interrupt) -> Path:
    """The file of the warm start's weights, trained first if the cache does not hold it; in process 0, which does it for all.

    Raises:
      ConfigError: the cache cannot be written, or is not shared with process 0.
    """
    config = job.config

    def build(folder: Path) -> None:
        job.say(f"no warm start in the cache: training the policy for {config.sft.steps} steps")
        began = time.perf_counter()
        with Progress("warm start", config.sft.steps) as progress, interrupt.nothing_unsaved("warm start", progress.stop):
            save_tree(folder / WEIGHTS, warm_start(on_this_process(job), progress))
        job.say(f"the warm start took {time.perf_counter() - began:.0f} s")

    with interrupt.nothing_unsaved("looking for the warm start"):
        return cached(policy_key(job), in_process_0(build), job.say) / WEIGHTS


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains the warm start, or finds it in the cache, and says where it is."""
    if job.config.sft.steps == 0:
        raise ConfigError("sft.steps is 0, so there is nothing to train; set --sft.steps")
    job.say(f"policy: {process_0_first(lambda: cached_policy(job, interrupt))}")
    return 0


if __name__ == "__main__":
    sys.exit(run("train_sft", "Trains the policy's supervised warm start and keeps it in the cache.", main, used=OF_POLICY))
