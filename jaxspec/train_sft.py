"""Supervised warm start of the embedded model, on generated documents: `python -m jaxspec.train_sft --config rl_think.py`."""

import sys

if __name__ == "__main__":  # a stop while the rest is imported, which takes seconds, has nothing to save
    from jaxspec.begin import begin

    begin()

import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import mesh as meshes
from jaxspec import tasks
from jaxspec.cache import cached, content_key, save_tree
from jaxspec.config import ConfigError
from jaxspec.interrupt import Interrupt
from jaxspec.metrics import Progress
from jaxspec.models.decoder import Decoder
from jaxspec.program import Job, in_process_0, on_this_process, process_0_first, run, sources
from jaxspec.rl import optim
from jaxspec.rl.logprob import positions_of, token_logprobs
from jaxspec.rl.loss import masked_mean
from jaxspec.sampling import Processing
from jaxspec.state import Learner, PyTree
from jaxspec.streams import Stream, stream_rng
from jaxspec.sync import cast
from jaxspec.unused import OF_POLICY

WEIGHTS = "weights.npz"


def document_loss(
    network: Decoder, tokens: Int[Array, "B T"], prompt_lengths: Int[Array, " B"], lengths: Int[Array, " B"], dtype: jax.typing.DTypeLike
) -> Float[Array, ""]:
    """Mean negative log-likelihood, in nats a token, of what follows each document's prompt."""
    network = cast(network, dtype)
    positions = positions_of(tokens)
    logprobs, _ = token_logprobs(network, network(tokens, positions).hidden, tokens, prompt_lengths, Processing())
    first = jnp.maximum(prompt_lengths, 1)  # nothing precedes position 0
    return -masked_mean(logprobs, (positions >= first[:, None]) & (positions < lengths[:, None]))


def warm_start(job: Job, progress: Progress) -> Decoder:
    """Trains a fresh policy for `sft.steps` updates; the data and the noise follow from the seed alone."""
    config = job.config
    sft, mesh = config.sft, job.mesh
    optimizer = optim.adamw(optim.cosine(sft.learning_rate, sft.steps), grad_clip=1.0, weight_decay=0.01)
    rng = stream_rng(config.seed, Stream.DOCUMENTS)
    length = config.data.max_prompt_length + config.rollout.max_new_tokens
    rows = meshes.rows_sharding(mesh)

    def fresh() -> Learner:
        return optim.start(job.step.fresh_policy(), optimizer)

    def step(learner: Learner, batch: PyTree) -> tuple[Learner, tuple[Float[Array, ""], Int[Array, ""]]]:
        loss, gradients = optim.value_and_grad(lambda network: document_loss(network, *batch, dtype=config.model.dtype), learner.network)
        learner, _ = optim.update(learner, gradients, loss, optimizer)
        return learner, (loss, learner.skipped_in_row)

    layout = job.step.train_layout(jax.eval_shape(fresh))
    learner = jax.jit(fresh, out_shardings=layout)()
    update = jax.jit(step, donate_argnums=0, out_shardings=(layout, meshes.replicated(mesh)))
    for number in range(1, sft.steps + 1):
        batch = tasks.sample_sft_batch(config.data, sft.wrong_steps, job.tokenizer, rng, sft.rows, length)
        learner, (loss, skipped_in_row) = update(learner, jax.device_put(batch, rows))
        progress.update(number, loss=float(loss))
        optim.require_progress(int(skipped_in_row), "policy", f"step {number} of the warm start", "Lower --sft.learning_rate.")
    return learner.network


def policy_key(job: Job) -> str:
    """Names the warm start by all that shapes it."""
    config = job.config
    shape = config.data.task, config.data.digits, config.data.format, config.data.max_prompt_length, config.rollout.max_new_tokens
    code = sources("tasks.py", "tokenizer.py", "train_sft.py", "streams.py", "models/*.py", "rl/logprob.py", "rl/loss.py", "rl/optim.py")
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
