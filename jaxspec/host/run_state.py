"""Where a run stands between two calls: before the first one, from a checkpoint, and from then
on."""

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.history import History
from jaxspec.host.batches import Batches, Pool
from jaxspec.host.draft_data import Rows, training_text
from jaxspec.host.draft_training import cached_draft
from jaxspec.host.job import Job
from jaxspec.host.round_cost import with_chooser
from jaxspec.host.runner import Runner, abstract, times_real_rounds
from jaxspec.host.warm_start import load_draft, load_policy, say_agreement
from jaxspec.processes.process_0 import agreed_by_process_0
from jaxspec.rollout import length_chooser
from jaxspec.state import Finished, Prompts, PyTree, TrainState
from jaxspec.storage.cache import load_tree
from jaxspec.storage.checkpoint import Checkpoints, heir
from jaxspec.system.alarms import StallWatch
from jaxspec.system.interrupt import Interrupt


@dataclasses.dataclass
class Pending:
    """The batch in `RunState.finished`, which the next call learns from."""

    line: dict[str, Any]
    """Its metrics so far, which that call completes."""
    samples: list[dict[str, Any]]
    """Responses that are kept for reading."""


@dataclasses.dataclass
class RunState:
    """Where a run stands between two calls; with `TrainState`, all that the next call needs."""

    state: TrainState
    finished: Finished
    batch: int
    """The next batch to generate."""
    rollouts: int
    """Training rollouts made so far: as many as batches, or more where several fill one."""
    pending: Pending | None = None
    """None: every batch that was generated is learnt from."""
    pool: Pool | None = None
    """The batch that rollouts are filling; None: each is a batch."""
    here: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The machine and mesh that it runs on."""
    timed_on: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the costs of rounds were timed by which draft lengths are chosen."""

    @property
    def number(self) -> int:
        """Name of its checkpoint: twice the rollouts made, and one more where none of them is a
        batch to learn from."""
        return 2 * self.rollouts + (self.pending is None)

    def to_save(self, history: History) -> tuple[PyTree, dict[str, Any], dict[str, Any] | None]:
        """Its arrays, without plans, which are of a mesh and made again; and the rest as JSON: what
        all processes have alike, and what each has by itself."""
        host: dict[str, Any] = {"batch": self.batch, "rollouts": self.rollouts}
        host["timed_on"] = self.timed_on
        filling = None
        if self.pool is not None:
            filling = self.pool.batch
            host["pool"] = {"groups": self.pool.groups, "lines": self.pool.lines}
        host["pending"] = None if self.pending is None else dataclasses.asdict(self.pending)
        own = None
        if history.past:
            host["keepers"], own = history.keepers, {"kept": history.dump()}
        return (self.state, self.finished.replace(plan=None), filling), host, own

    @property
    def over(self) -> int:
        """Batches whose line is written."""
        return self.batch if self.pending is None else self.pending.line["step"]


def offline_text(job: Job) -> Rows | None:
    """What the draft is trained on before the run, where that is a text; a bad file is named before
    any long work."""
    trained = job.config.offline.steps > 0 and job.config.rollout.draft.learned
    return training_text(job.config, job.tokenizer, job.say) if trained else None


def start(job: Job, interrupt: Interrupt, batches: Batches, text: Rows | None) -> RunState:
    """The run before the first batch: policy and draft from checkpoints, or from the cache, trained
    now if absent, or random.

    `text` is that of `offline_text`.
    """
    config, step = job.config, job.step
    layout, shapes = step.state_shardings(), abstract(step, config.batch.prompts)[0]
    offline = config.offline.steps > 0 and shapes.learner.draft is not None
    trained = cached_draft(job, interrupt, text) if offline else None
    network = None if offline else load_draft(job, _network(shapes))
    policy = load_policy(job, interrupt)
    if trained is not None:
        network = load_tree(trained, _network(shapes))
    elif network is not None:
        say_agreement(job, policy, network)
    else:
        network = jax.jit(lambda: _network(step.fresh()), out_shardings=_network(layout))()
        if remark := random_draft(config):
            job.say(remark)
    state = jax.jit(step.start, out_shardings=layout, donate_argnums=(0, 1))(policy, network)
    here = meshes.machine(job.mesh)
    return RunState(
        state=choosing(job, state, batches.train(0)),
        finished=batches.nothing_finished(),
        batch=0,
        rollouts=0,
        pool=batches.pool(),
        here=here,
        # on accelerators by the first rollout
        timed_on={} if times_real_rounds(step.generator) else here,
    )


def random_draft(config: ResolvedConfig) -> str:
    """A remark on a draft that nothing was trained for before the run; empty for any other."""
    draft = config.rollout.draft
    if not draft.learned or draft.path or config.offline.steps:
        return ""
    later = (
        "learns during the run alone"
        if config.draft_training.online
        else "never learns, so that next to nothing is accepted"
    )
    remedy = "--offline.steps 300 trains it first, --rollout.draft.path loads one"
    return (
        f"the {draft.kind} draft started from random weights (offline.steps 0, no"
        f" rollout.draft.path) and {later}; {remedy}"
    )


def stall_watch(config: ResolvedConfig, lines: Iterable[Mapping[str, Any]]) -> StallWatch:
    """Watches for signs that the run cannot learn; it starts from the `lines` of earlier
    batches."""
    optimizer, batch = config.optimizer, config.batch
    updates = config.steps * batch.mini_batches * batch.epochs
    rate = config.learning_rates.policy * min(1.0, updates / max(optimizer.warmup_steps, 1))
    watch = StallWatch(config.advantage.baseline != "none", rate)
    for line in lines:
        watch.look(line)
    return watch


def choosing(job: Job, state: TrainState, prompts: Prompts) -> TrainState:
    """The state with what draft lengths are chosen by, where they are."""
    if state.generator.chooser is None:
        return state
    later = times_real_rounds(job.step.generator)
    if not later:
        job.say(
            "measuring what rounds of each draft length cost on this machine, and what the draft is"
            " worth"
        )
    began = time.perf_counter()
    state, lengths = with_chooser(job.step, state, prompts), job.step.generator.settings.lengths
    chooser = state.generator.chooser
    assert chooser is not None, "lengths are chosen by costs"
    full = np.asarray(chooser.round_cost)[:, 0, 0]
    kept = np.asarray(length_chooser.expected_tokens(chooser.acceptance, lengths))
    rounds = zip(lengths, full / full[0], kept, strict=True)
    table = "; ".join(
        f"K={length} costs {cost:.2f} plain steps and keeps {tokens:.2f} tokens"
        for length, cost, tokens in rounds
    )
    how = f"measured in {time.perf_counter() - began:.1f} s"
    if later:
        how = "by public figures or an earlier run, until the first rollout has timed its rounds"
    job.say(f"{how}: {table}")
    return state


def timed_anew(job: Job, state: TrainState, prompts: Prompts) -> TrainState:
    """The state of a run from elsewhere, with this machine's costs of rounds.

    The acceptance that the run has seen stays.
    """
    job.say("the costs of rounds in the checkpoint are of another machine or mesh")
    known = state.generator.chooser
    assert known is not None, "lengths are chosen by costs"
    state = choosing(job, state, prompts)
    assert state.generator.chooser is not None, "lengths are chosen by costs"
    chooser = state.generator.chooser.replace(acceptance=known.acceptance)
    return state.replace(generator=state.generator.replace(chooser=chooser))


def _network(state: TrainState) -> PyTree:
    return None if state.learner.draft is None else state.learner.draft.network


def resume(
    job: Job, checkpoints: Checkpoints, batches: Batches, runner: Runner | None = None
) -> RunState | None:
    """The run of the newest checkpoint that is whole, on this run's mesh; None when there is
    none. `runner` makes its steps."""
    state, finished, _ = abstract(job.step, job.config.batch.prompts)
    rows = finished.replace(plan=None)
    restored = checkpoints.restore_newest((state, rows, rows if job.step.fills else None))
    if restored is None:
        return None
    (state, finished, filling), host = restored.arrays, restored.host
    job.say(f"resuming {job.config.workdir} at batch {host['batch']}")
    batches.history.load(
        [(problem, heir(keeper)) for problem, keeper in host.get("keepers", [])],
        [own["kept"] for own in restored.own],
    )
    here, timed_on = meshes.machine(job.mesh), host.get("timed_on", {})
    if state.generator.chooser is not None and agreed_by_process_0(timed_on != here):
        state = timed_anew(job, state, batches.train(host["rollouts"]))
        if runner is not None:
            runner.time_anew()
        timed_on = {} if times_real_rounds(job.step.generator) else here
    pending = None if host["pending"] is None else Pending(**host["pending"])
    pool = None if filling is None else Pool(filling, **host["pool"])
    return RunState(
        state=state,
        finished=batches.replanned(finished),
        batch=host["batch"],
        rollouts=host["rollouts"],
        pending=pending,
        pool=pool,
        here=here,
        timed_on=timed_on,
    )
