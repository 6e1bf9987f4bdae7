"""Between the host and the step: the prompts of a rollout, and its rewards, and what batch they
make; each process sees to its own rows."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jaxspec import mesh as meshes
from jaxspec.data.history import Answers, History
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import ProblemSets, pad_prompts
from jaxspec.data.scoring import Judge, Judged, scorer_of
from jaxspec.host.job import Job
from jaxspec.host.runner import abstract, put
from jaxspec.inputs.streams import Stream
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rewards.shaping import overlong_penalty
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import LENGTH, Finished, Plan, Prompts, Rollout
from jaxspec.system.metrics import over_rollouts, standard_deviation


class Scored(NamedTuple):
    """A rollout with its rewards, and what became of its rows, over all processes."""

    finished: Finished
    reward: float
    """Mean over the rows that have one; NaN where none has."""
    outcomes: dict[str, float]
    """Share of the rows that ended by outcome, some of which leave a row without a reward; of
    several sets of problems the mean reward of each."""
    samples: list[dict[str, Any]]
    """Some rows of this process, as text."""
    differing: Bool[np.ndarray, " n"]
    """Groups whose rewards, before any was taken for length, are not all alike."""
    std: float = 0.0
    """Of these rows' rewards; exactly 0 if all are equal."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the rewards."""
        known = {"reward/mean": self.reward, "reward/std": self.std}
        return {**known, **self.outcomes, "reward/frac_zero_std": 1 - float(self.differing.mean())}


@dataclasses.dataclass
class Pool:
    """A batch that is being filled with groups whose rewards differ (dynamic sampling)."""

    batch: Finished
    """On the devices; without a plan."""
    groups: int = 0
    """In it."""
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Metrics of the rollouts that it was filled from so far."""


class Batches:
    """Prompts by number of the rollout from the training stream, their rewards, and what is learnt
    from together."""

    def __init__(self, job: Job, sets: ProblemSets, scorers: SetScorers | None = None):
        self._job, self.sets = job, sets
        self._given, self._asking = scorers, 0
        self._stream = sets.stream(job.config.seed)
        self._prompts, self.group = job.config.batch.prompts, job.config.batch.group_size
        me = jax.process_index()
        self.history = History(job.config.rollout.past, me)
        _, self._finished, self._like = abstract(job.step, self._prompts)
        self._copies, _ = meshes.holders(job.mesh, self._prompts)
        _, self._owners = meshes.holders(job.mesh, self._prompts * self.group)
        self._here, self._owned = self._copies[me], self._owners == me

    @cached_property
    def _judge(self) -> Judge:
        """Its workers start when they are first wanted: whoever only asks needs none."""
        scorers = self._given or scorer_of(self._job.config)
        return Judge(scorers, self._job.tokenizer, self.group)

    def train(self, batch: int) -> Prompts:
        """The prompts of a training rollout."""
        self._asking = batch
        return self._place_training(batch, Stream.TRAIN)

    def compare(self, batch: int) -> Prompts:
        """The prompts of a training rollout under other noise: history has its answers by now, and
        must not hand them back."""
        return self._place_training(batch, Stream.COMPARE)

    def evaluate(self, problems: Mapping[int, Problem], call: int) -> Prompts:
        """The prompts of one evaluation call: problems by their place among the prompts, of which
        the others are not answered."""
        here = {place: problem for place, problem in problems.items() if self._here[place]}
        return self._place(here, Stream.EVALUATE, call, {})

    def nothing(self, batch: int) -> Prompts:
        """No prompts: for the call that only learns."""
        return self._place({}, Stream.TRAIN, batch, {})

    def nothing_finished(self) -> Finished:
        """No rollout: for calls that only generate."""
        return put(self._job.step.nothing_finished(self._prompts * self.group), self._finished)

    def score_training(self, batch: int, rollout: Rollout) -> Scored:
        """Rewards of a training rollout, whose answers are remembered where drafts look through
        them."""
        self.remember(batch, rollout)
        return self._score(self._judge(self._training_problems(batch), rollout), rollout)

    def score_evaluation(self, problems: Mapping[int, Problem], rollout: Rollout) -> Judged:
        """What the answers to this process's problems of an evaluation call earn."""
        owned = self.prompts_here
        here = {place: problem for place, problem in problems.items() if owned[place]}
        judged = self._judge(here, rollout)
        counts = np.asarray([judged.ended.sum(), judged.rewarded.sum()], np.float32)
        ended, known = meshes.sum_over_processes(counts).tolist()
        self._require_few(ended - known, ended, judged.scores.reason, False)
        return judged

    def pool(self) -> Pool | None:
        """An empty one, where batches are filled by several rollouts."""
        if not self._job.step.fills:
            return None
        return Pool(self.nothing_finished().replace(plan=None))

    def taken(
        self, pool: Pool, scored: Scored, line: dict[str, Any]
    ) -> tuple[Pool, Finished | None, dict[str, Any]]:
        """The pool after a rollout with its metrics, and the batch that this completes with metrics
        over all its rollouts, if it does.

        Raises:
          Diverged: as many rollouts as may be have no group whose rewards differ; the pool stays as
            it was.
        """
        settings, most = self._job.config.dynamic_sampling, self._prompts
        found = np.flatnonzero(scored.differing)
        rollouts = len(pool.lines) + 1
        if not pool.groups and not len(found) and rollouts >= settings.max_batches:
            told = over_rollouts([*pool.lines, line])
            raise Diverged(_no_group(rollouts, rollouts * most, told))
        new, left = np.split(found, [most - pool.groups])
        batch = self._with_groups(pool.batch, scored.finished, new, pool.groups)
        pool = Pool(batch, pool.groups + len(new), [*pool.lines, line])
        if pool.groups < most and rollouts < settings.max_batches:
            return pool, None, {}
        next_one = self.pool()
        assert next_one is not None, "there is one already"
        carried = left if settings.surplus == "carry" else left[:0]
        if len(carried):
            rows = self._with_groups(next_one.batch, scored.finished, carried, 0)
            next_one = Pool(rows, len(carried))
        counts = {
            "dynamic_sampling/rollouts": rollouts,
            "dynamic_sampling/groups": pool.groups,
            "dynamic_sampling/carried": len(carried),
            "dynamic_sampling/dropped": len(left) - len(carried),
        }
        full = self.replanned(batch)
        learn = put(bool(np.asarray(full.plan.used).any()), self._finished.learn)
        return next_one, full.replace(learn=learn), over_rollouts(pool.lines) | counts

    def _with_groups(
        self, batch: Finished, rollout: Finished, groups: np.ndarray, first: int
    ) -> Finished:
        """A batch with groups of a rollout behind its first ones."""
        places = dynamic_sampling.places(
            groups, first, self._prompts, self._job.config.batch.mini_batches
        )
        sharded = jax.ShapeDtypeStruct(
            places.shape, places.dtype, sharding=meshes.rows_sharding(self._job.mesh)
        )
        return self._fill(batch, rollout.replace(plan=None), put(places, sharded))

    @cached_property
    def _fill(self) -> Callable[[Finished, Finished, jax.Array], Finished]:
        layout = jax.tree.map(lambda leaf: leaf.sharding, self._finished.replace(plan=None))
        fill = partial(dynamic_sampling.filled, mesh=self._job.mesh)
        return jax.jit(fill, donate_argnums=0, out_shardings=layout)

    def replanned(self, finished: Finished) -> Finished:
        """A finished batch with a plan for this mesh: the one of another mesh, or of other
        micro-batches, is no use."""
        rows = np.flatnonzero(self._owned).astype(np.int32)
        table = np.zeros(len(self._owned), np.float32)
        lengths, status, valid = (
            meshes.local_rows(leaf, rows)
            for leaf in (finished.rollout.lengths, finished.rollout.status, finished.valid)
        )
        table[rows] = self._read(lengths, status, valid)
        return finished.replace(plan=self._planned(meshes.sum_over_processes(table)))

    def _read(self, lengths: np.ndarray, status: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Tokens of each row that learning reads."""
        cut = (status == LENGTH) & self._job.config.overlong.filter
        return np.where(valid & ~cut, lengths - 1, 0)

    def _planned(self, read: np.ndarray) -> Plan:
        """The plan for rows of which so many tokens are read, on the devices."""
        return put(self._job.step.planned(read.astype(np.int32)), self._finished.plan)

    @property
    def prompts_here(self) -> Bool[np.ndarray, " n"]:
        """Prompts of a call whose rows this process judges."""
        return self._owned[:: self.group]

    def _training_problems(self, batch: int, mask: np.ndarray | None = None) -> dict[int, Problem]:
        """Those of some places among the prompts; by default of those whose rows are here."""
        mask = self.prompts_here if mask is None else mask
        return {
            int(place): self._stream[batch * self._prompts + int(place)]
            for place in np.flatnonzero(mask)
        }

    def _numbers(self, batch: int) -> list[int]:
        """Which problems are asked in a training rollout, of all processes."""
        first = batch * self._prompts
        return [self._stream.number(first + place) for place in range(self._prompts)]

    def _place_training(self, batch: int, stream: int) -> Prompts:
        """The prompts of a training rollout, with what is remembered of them."""
        numbers, askers = self._numbers(batch), dict[int, set[int]]()
        if self.history.past:
            for number, copies in zip(numbers, self._copies.T, strict=True):
                askers.setdefault(number, set()).update(np.flatnonzero(copies).tolist())
        found = self.history.brought(askers)
        remembered = {place: found.get(number, []) for place, number in enumerate(numbers)}
        return self._place(self._training_problems(batch, self._here), stream, batch, remembered)

    def _place(
        self, problems: dict[int, Problem], stream: int, batch: int, remembered: Answers
    ) -> Prompts:
        """Prompts, of which this process sees to those that have a copy here, with the answers that
        are remembered, by place."""
        width, pad = self._job.config.data.max_prompt_length, self._job.tokenizer.pad_id
        like = self._like
        here = np.flatnonzero(self._here)
        rows = np.searchsorted(here, list(problems))
        tokens = np.full((len(here), width), pad, np.int32)
        lengths, live = np.ones(len(here), np.int32), np.zeros(len(here), bool)
        history = np.zeros((len(here), *like.history.shape[1:]), np.int32)
        history_lengths = np.zeros((len(here), self.history.past), np.int32)
        if problems:
            tokens[rows], lengths[rows] = pad_prompts(list(problems.values()), width, pad)
            live[rows] = True
        for row, (place, problem) in zip(rows, problems.items(), strict=True):
            for number, answer in enumerate(remembered.get(place, [])):
                text = np.concatenate([problem.ids, answer])
                history[row, number, : len(text)] = text
                history_lengths[row, number] = len(text)
        parts = {
            "tokens": tokens,
            "lengths": lengths,
            "live": live,
            "history": history,
            "history_lengths": history_lengths,
        }
        by_row: dict[str, Any] = {
            name: meshes.from_local_rows(getattr(like, name), here, values)
            for name, values in parts.items()
        }
        which = put((jnp.int32(stream), jnp.int32(batch)), (like.stream, like.batch))
        return Prompts(**by_row, stream=which[0], batch=which[1])

    def remember(self, batch: int, rollout: Rollout) -> None:
        """Keeps the answers where drafts look through them."""
        if not self.history.past:
            return
        mine, kept = np.flatnonzero(self.prompts_here), min(self.group, self.history.past)
        rows = np.asarray([place * self.group + n for place in mine for n in range(kept)], np.int32)
        tokens, starts, ends = (
            meshes.local_rows(leaf, rows)
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        answers = [text[a:b] for text, a, b in zip(tokens, starts, ends, strict=True)]
        numbers, owners = self._numbers(batch), self._owners[:: self.group].tolist()
        # A problem that a batch asks twice is remembered by its last place.
        made = {numbers[place]: answers[n * kept : (n + 1) * kept] for n, place in enumerate(mine)}
        self.history.keep(dict(zip(numbers, owners, strict=True)), made)

    def _score(self, judged: Judged, rollout: Rollout) -> Scored:
        """What the rewards of a training rollout come to, over all processes."""
        rows, scores, config = judged.rows, judged.scores, self._job.config
        overlong, longest = config.overlong, config.rollout.max_new_tokens
        responses = judged.ends - judged.starts
        lost = overlong_penalty(responses, longest, overlong.buffer, overlong.penalty)
        rewarded = judged.rewarded
        # Of other processes' rows, these four numbers are all that a process gets to know.
        columns = {
            "rewarded": rewarded,
            "reward": np.where(rewarded, scores.rewards, 0),
            "lost": np.where(rewarded, lost, 0),
            "read": self._read(judged.ends, judged.status, rewarded),
        }
        judges = np.asarray([problem.judge for problem in judged.problems], np.int32)
        own = [judges == number for number in range(len(config.training_sets))]
        counts = {
            "ended": judged.ended.sum(),
            **{_share(each): (judged.ended & (scores.outcomes == each)).sum() for each in Outcome},
            **{f"rewarded/{set_}": (mask & rewarded).sum() for set_, mask in enumerate(own)},
            **{f"reward/{set_}": columns["reward"][mask].sum() for set_, mask in enumerate(own)},
        }
        table = np.zeros((len(columns), len(self._owned)), np.float32)
        for number, column in enumerate(columns.values()):
            table[number, rows] = column
        here = np.concatenate([table.ravel(), np.asarray([*counts.values()], np.float32)])
        whole = meshes.sum_over_processes(here)
        found: dict[str, Any] = dict(
            zip(columns, whole[: table.size].reshape(table.shape), strict=True)
        )
        found |= dict(zip(counts, whole[table.size :].tolist(), strict=True))
        count, valid = found["ended"], found["rewarded"] > 0
        self._require_few(count - float(valid.sum()), count, scores.reason, True)
        plan, like = self._planned(found["read"]), self._finished
        # where overlong.filter leaves nothing to read, that is no fault of the update
        learn = bool(found["read"].any() or not valid.any())
        rewards, valid_there, learn = put(
            (found["reward"] + found["lost"], valid, learn), (like.rewards, like.valid, like.learn)
        )
        counted = float(valid.sum()) or math.nan
        metrics = {_share(each): found[_share(each)] / (count or math.nan) for each in Outcome}
        if overlong.buffer:
            metrics["reward/overlong"] = float(found["lost"].sum()) / counted
        if len(self.sets.training) > 1:
            for number, each in enumerate(config.training_sets):
                rewarded_of_set = found[f"rewarded/{number}"] or math.nan
                metrics[f"reward/{each.name}/mean"] = found[f"reward/{number}"] / rewarded_of_set
        finished = Finished(
            rollout=rollout, rewards=rewards, valid=valid_there, plan=plan, learn=learn
        )
        return Scored(
            finished,
            float(found["reward"].sum()) / counted,
            metrics,
            self._samples(judged),
            dynamic_sampling.differing(found["reward"], valid, self.group),
            standard_deviation(found["reward"][valid]),
        )

    def _samples(self, judged: Judged) -> list[dict[str, Any]]:
        """The first answer to each problem here, as text."""
        scores, asked = judged.scores, judged.asked
        return [
            {
                "prompt": asked.prompts[row],
                "response": asked.responses[row],
                "answer": asked.answers[row],
                "reward": float(scores.rewards[row]) if scores.known[row] else None,
                "outcome": Outcome(scores.outcomes[row]).name.lower(),
                "rounds": int(judged.rounds[row]),
            }
            for row in range(0, len(judged.rows), self.group)
        ]

    def begin_scoring(self, rollout: Rollout) -> None:
        """Has the workers begin with rows of the training rollout that have ended, while others
        still generate."""
        if self._judge.has_workers:
            rows = np.flatnonzero(self._owned).astype(np.int32)
            self._judge.begin(self._training_problems(self._asking), rollout, rows)

    def _require_few(self, failed: float, rows: float, reason: str, trains: bool) -> None:
        """Whether nothing is known of few rows of a rollout, which are left out."""
        if not failed:
            return
        most = self._job.config.reward.max_failed
        reason = reason or "another process knows why"
        told = f"no reward is known of {failed:.0f} of {rows:.0f} responses"
        if trains and failed > most * rows:
            raise Diverged(
                f"{told}, and reward.max_failed is {most:g}: {reason}. Mend that; the same"
                " command goes on from the newest checkpoint"
            )
        self._job.say(f"warning: {told}, which are left out: {reason}")


def _no_group(rollouts: int, groups: int, line: dict[str, Any]) -> str:
    shares = ", ".join(f"{outcome.name.lower()} {line[_share(outcome)]:.0%}" for outcome in Outcome)
    return (
        f"dynamic sampling has found no group whose answers earn different rewards: none of"
        f" {groups} in {rollouts} rollouts, whose mean reward is {line['reward/mean']:.3g}"
        f" ({shares}; samples.jsonl has some answers). Near 1 the problems are too easy for this"
        " policy; near 0 they are too hard, or the reward finds no answer. The same command makes"
        " one more rollout; in a new --workdir other problems, a larger --batch.group_size, a"
        f" higher --rollout.temperature or more --dynamic_sampling.max_batches, now {rollouts},"
        " may find some"
    )


def _share(outcome: Outcome) -> str:
    return f"reward/{outcome.name.lower()}"
