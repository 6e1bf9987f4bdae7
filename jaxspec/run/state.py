"""State of a run between calls, and its checkpoints."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import mesh as meshes
from jaxspec.data.history import AnswerHistory
from jaxspec.host.programs import abstract_arguments
from jaxspec.inputs.checked import require
from jaxspec.rl.optimizers import BROKEN, SKIPPED, SOUND, assess_condition
from jaxspec.run.dynamic_batch import PartialBatch
from jaxspec.state import NetworkState, PyTree, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.checkpoint import Checkpoints, successor_process
from jaxspec.system.terminal import LinePrinter

FORMAT = 2
"""Version of what checkpoints hold. Another one is refused."""
_FAULTS = {
    SKIPPED: "last update was skipped, because its loss or gradient was not finite",
    BROKEN: "weights or moments are not finite",
}


@dataclasses.dataclass
class BatchRecord:
    """Record of a batch. It is complete after the update on the batch."""

    batch: int
    """Place in the run, from 0."""
    metrics: dict[str, Any]
    """Metrics so far, by name."""
    samples: list[dict[str, Any]]
    """Answers that are kept for reading."""

    @property
    def metrics_line(self) -> dict[str, Any]:
        """Line of metrics.jsonl."""
        return {"step": self.batch, **self.metrics}


@dataclasses.dataclass
class QueuedBatch:
    """A scored batch that waits for its update."""

    rollout: ScoredRollout
    record: BatchRecord


@dataclasses.dataclass
class GenerationProgress:
    """Progress of generation in a run."""

    generated: int = 0
    """Number of training rollouts generated. Dynamic sampling may use several for a batch."""
    filling: PartialBatch | None = None
    """Batch that rollouts are filling. None without dynamic sampling."""


@dataclasses.dataclass
class RunState:
    """State of a run between two calls: all that the next call needs."""

    state: TrainState
    history: AnswerHistory
    """Earlier answers, for drafts that look them up."""
    queue: list[QueuedBatch] = dataclasses.field(default_factory=list)
    """Batches that wait for their update, oldest first."""
    learned: int = 0
    """Number of batches learned from."""
    generation: GenerationProgress = dataclasses.field(default_factory=GenerationProgress)
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Machine and mesh of this process."""
    timed_on: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Machine and mesh that timed the rounds by which draft lengths are chosen."""

    @property
    def generated(self) -> int:
        """Number of training rollouts generated."""
        return self.generation.generated

    @property
    def next_batch(self) -> int:
        """Number of the next batch to generate."""
        return self.learned + len(self.queue)

    @property
    def checkpoint_number(self) -> int:
        """Number of its checkpoint: rollouts generated plus batches learned from."""
        # Every call raises the sum, also one that only learns or only generates.
        return self.generated + self.learned

    def has_ended(self, steps: int) -> bool:
        """Returns whether all `steps` batches are learned from."""
        return self.learned >= steps and not self.queue

    def to_checkpoint(self) -> tuple[PyTree, dict[str, Any], dict[str, Any] | None]:
        """Returns the content of a checkpoint.

        It has arrays, JSON values of the run, and JSON values of this process. The last are None
        without answers for drafts.
        """
        # Plans belong to a mesh, so a restored run makes them again.
        queue = tuple(item.rollout.replace(plan=None) for item in self.queue)
        host_state: dict[str, Any] = {
            "format": FORMAT,
            "generated": self.generated,
            "learned": self.learned,
            "timed_on": self.timed_on,
            "queue": [dataclasses.asdict(item.record) for item in self.queue],
        }
        rows = None
        filling = self.generation.filling
        if filling is not None:
            rows = filling.rows
            host_state["filling"] = {"groups": filling.groups, "metrics": filling.metrics}
        process_state = None
        if self.history.past:
            host_state["keepers"] = self.history.owners
            # Each process has the answers to some of the problems.
            process_state = {"kept": self.history.encode_answers()}
        return (self.state, queue, rows), host_state, process_state


def restore_run(
    step: Step, prompts: int, checkpoints: Checkpoints, history: AnswerHistory
) -> RunState | None:
    """Restores the newest intact checkpoint. Returns None if there is no checkpoint.

    Arrays are placed on the step's mesh. Batches have no plans.

    Args:
      step: the run's step.
      prompts: number of prompts in a batch.
      checkpoints: the run's checkpoints.
      history: gets the earlier answers.

    Raises:
      ConfigError: all are damaged, or do not fit the config or this version of jaxspec.
    """
    state, rollout, _ = abstract_arguments(step, prompts)
    rows = rollout.replace(plan=None)

    def describe_arrays(host_state: dict[str, Any]) -> PyTree:
        # The first format had no number.
        version = host_state.get("format", 1)
        require(
            version == FORMAT,
            f"the checkpoints in {checkpoints.folder} have format {version}, and this version of"
            f" jaxspec reads format {FORMAT}; use the version that wrote them, or another"
            " --workdir",
        )
        return state, (rows,) * len(host_state["queue"]), rows if "filling" in host_state else None

    restored = checkpoints.restore_latest(describe_arrays)
    if restored is None:
        return None
    (state, queue, filling), host_state = restored.arrays, restored.host_state
    # There may be fewer processes now than when the checkpoint was saved.
    history.restore_answers(
        [(problem, successor_process(owner)) for problem, owner in host_state.get("keepers", [])],
        [process_state["kept"] for process_state in restored.process_states],
    )
    records = [BatchRecord(**record) for record in host_state["queue"]]
    return RunState(
        state=state,
        history=history,
        queue=[QueuedBatch(*item) for item in zip(queue, records, strict=True)],
        learned=host_state["learned"],
        generation=GenerationProgress(
            host_state["generated"],
            None if filling is None else PartialBatch(filling, **host_state["filling"]),
        ),
        timed_on=host_state["timed_on"],
    )


class CheckpointSaver:
    """Saves the checkpoints of a run."""

    def __init__(self, step: Step, checkpoints: Checkpoints, print_line: LinePrinter) -> None:
        self.checkpoints, self._print_line = checkpoints, print_line
        self.unsaved = ""
        """Why the run could not be saved last. Empty if it was saved."""
        self._read_conditions = jax.jit(
            _network_conditions, out_shardings=meshes.replicated_sharding(step.learner.mesh)
        )

    def save(self, run: RunState) -> None:
        """Starts to save a checkpoint with all that the next call needs.

        Weights that are not sound are not saved, and `unsaved` gets the reason.
        """
        # No resume could recover from unsound weights, and they would replace sound checkpoints.
        checkpoints = self.checkpoints
        self.unsaved = self.describe_faults(run)
        if self.unsaved:
            newest = checkpoints.latest_step()
            remark = (
                "there is none before it"
                if newest is None
                else f"checkpoint {newest} stays the newest"
            )
            self._print_line(
                f"checkpoint {run.checkpoint_number} is not saved: {self.unsaved}; {remark}"
            )
            return
        checkpoints.save(run.checkpoint_number, *run.to_checkpoint())

    def describe_faults(self, run: RunState) -> str:
        """Describes faults that a run cannot go on from. Returns "" if the weights are sound."""
        conditions = np.asarray(self._read_conditions(run.state)).tolist()
        # Without a draft that has weights, there is one condition only.
        by_network = zip(("policy", "draft"), conditions, strict=False)
        return " and ".join(
            f"the {name}'s {_FAULTS[condition_code]}"
            for name, condition_code in by_network
            if condition_code != SOUND
        )


def _network_conditions(state: TrainState) -> Int[Array, " n"]:
    """Returns the condition of the policy and, if it has weights, of the draft."""
    states = state.learner.policy, state.learner.draft
    return jnp.stack([assess_condition(item) for item in states if isinstance(item, NetworkState)])
