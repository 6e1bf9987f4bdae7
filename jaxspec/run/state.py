"""State of a run between calls, and its checkpoints."""

import dataclasses
from typing import Any

from jaxspec.data.history import AnswerHistory
from jaxspec.host.programs import abstract_arguments
from jaxspec.inputs.checked import require
from jaxspec.run.dynamic_batch import PartialBatch
from jaxspec.state import PyTree, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.checkpoint import Checkpoints, successor_process

FORMAT = 2
"""Version of what checkpoints hold. Another one is refused."""


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
class RunState:
    """State of a run between two calls: all that the next call needs."""

    state: TrainState
    history: AnswerHistory
    """Earlier answers, for drafts that look them up."""
    queue: list[QueuedBatch] = dataclasses.field(default_factory=list)
    """Batches that wait for their update, oldest first."""
    generated: int = 0
    """Number of training rollouts generated. Dynamic sampling may use several for a batch."""
    learned: int = 0
    """Number of batches learned from."""
    filling: PartialBatch | None = None
    """Batch that rollouts are filling. None without dynamic sampling."""
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Machine and mesh of this process."""
    timed_on: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Machine and mesh that timed the rounds by which draft lengths are chosen."""

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
        if self.filling is not None:
            rows = self.filling.rows
            host_state["filling"] = {"groups": self.filling.groups, "metrics": self.filling.metrics}
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
        generated=host_state["generated"],
        learned=host_state["learned"],
        filling=None if filling is None else PartialBatch(filling, **host_state["filling"]),
        timed_on=host_state["timed_on"],
    )
