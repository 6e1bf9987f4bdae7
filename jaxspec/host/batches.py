"""Between the host and the step: the prompts of a rollout, and its rewards, and what batch they
make; each process sees to its own rows."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jaxspec import mesh as meshes
from jaxspec.data.history import History
from jaxspec.data.problem_source import Problem, Problems
from jaxspec.data.problems import PromptStream, pad_prompts
from jaxspec.data.scoring import scorer_of
from jaxspec.host.job import Job
from jaxspec.host.runner import abstract, put
from jaxspec.rewards.outcome import Outcome, nothing_known
from jaxspec.rewards.pool import PoolError
from jaxspec.rewards.scorer import Ahead, Rows, Scorer
from jaxspec.rewards.shaping import overlong_penalty
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import EOS, LENGTH, Finished, Plan, Prompts, Rollout
from jaxspec.streams import Stream
from jaxspec.system.metrics import over_rollouts


class Scored(NamedTuple):
    """A rollout with its rewards, and what became of its rows, over all processes."""

    finished: Finished
    reward: float
    """Mean over the rows that have one; NaN where none has."""
    outcomes: dict[str, float]
    """Share of the rows that ended by outcome, some of which leave a row without a reward."""
    samples: list[dict[str, Any]]
    """Some rows of this process, as text."""
    differing: Bool[np.ndarray, " n"]
    """Groups whose rewards, before any was taken for length, are not all alike."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the rewards."""
        alike = 1 - float(self.differing.mean())
        return {"reward/mean": self.reward, **self.outcomes, "reward/frac_zero_std": alike}


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
    """Prompts by number of the rollout, from the training stream or the held-out problems, their
    rewards, and what is learnt from together."""

    def __init__(
        self, job: Job, problems: Problems, held_out: Problems, scorer: Scorer | None = None
    ):
        self._job, self._held_out = job, held_out
        self._given, self._asking, self._ahead = scorer, 0, Ahead()
        self._stream = PromptStream(problems, job.config.seed)
        self._prompts, self._group = job.config.batch.prompts, job.config.batch.group_size
        self.history = History(job.config.rollout.past)
        _, self._finished, self._like = abstract(job.step, self._prompts)
        self._here, _ = meshes.rows_here(job.mesh, self._prompts)
        _, self._owned = meshes.rows_here(job.mesh, self._prompts * self._group)

    @cached_property
    def _scorer(self) -> Scorer:
        """Its workers start when they are first wanted: whoever only asks needs none."""
        return self._given or scorer_of(self._job.config)

    @property
    def evaluations(self) -> int:
        """Calls it takes to answer every held-out problem."""
        return -(-len(self._held_out) // self._prompts)

    def train(self, batch: int) -> Prompts:
        """The prompts of a training rollout."""
        self._asking = batch
        return self._place(self._training_problems(batch, self._here), Stream.TRAIN, batch)

    def compare(self, batch: int) -> Prompts:
        """The prompts of a training rollout under other noise: history has its answers by now, and
        must not hand them back."""
        return self._place(self._training_problems(batch, self._here), Stream.COMPARE, batch)

    def evaluate(self, call: int) -> Prompts:
        """The held-out prompts of one evaluation call; the last is padded with prompts that are not
        answered."""
        return self._place(self._held_out_problems(call, self._here), Stream.EVALUATE, call)

    def nothing(self, batch: int) -> Prompts:
        """No prompts: for the call that only learns."""
        return self._place({}, Stream.TRAIN, batch)

    def nothing_finished(self) -> Finished:
        """No rollout: for calls that only generate."""
        return put(self._job.step.nothing_finished(self._prompts * self._group), self._finished)

    def score_training(self, batch: int, rollout: Rollout) -> Scored:
        """Rewards of a training rollout, whose answers are remembered where drafts look through
        them."""
        self.remember(batch, rollout)
        return self._score(self._training_problems(batch, self._owned_prompts()), rollout, True)

    def score_evaluation(self, call: int, rollout: Rollout) -> Scored:
        """Rewards of an evaluation call."""
        return self._score(self._held_out_problems(call, self._owned_prompts()), rollout, False)

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

    def _owned_prompts(self) -> np.ndarray:
        return self._owned[:: self._group]

    def _training_problems(self, batch: int, mask: np.ndarray) -> dict[int, Problem]:
        return {
            int(place): self._stream[batch * self._prompts + int(place)]
            for place in np.flatnonzero(mask)
        }

    def _held_out_problems(self, call: int, mask: np.ndarray) -> dict[int, Problem]:
        first, count = call * self._prompts, len(self._held_out)
        return {
            int(place): self._held_out[first + int(place)]
            for place in np.flatnonzero(mask)
            if first + place < count
        }

    def _place(self, problems: dict[int, Problem], stream: int, batch: int) -> Prompts:
        width = self._job.config.data.max_prompt_length
        tokens = np.full((self._prompts, width), self._job.tokenizer.pad_id, np.int32)
        lengths = np.ones(self._prompts, np.int32)
        live, places, past = np.zeros(self._prompts, bool), list(problems), self.history.past
        history = np.zeros(self._like.history.shape, np.int32)
        history_lengths = np.zeros((self._prompts, past), np.int32)
        if places:
            tokens[places], lengths[places] = pad_prompts(
                list(problems.values()), width, self._job.tokenizer.pad_id
            )
            live[places] = True
        for place, problem in problems.items() if stream != Stream.EVALUATE else ():
            for number, text in enumerate(self.history.texts(problem.index, problem.ids)):
                history[place, number, : len(text)], history_lengths[place, number] = (
                    text,
                    len(text),
                )
        host: dict[str, Any] = {
            "tokens": tokens,
            "lengths": lengths,
            "live": live,
            "history": history,
            "history_lengths": history_lengths,
        }
        return put(Prompts(**host, stream=jnp.int32(stream), batch=jnp.int32(batch)), self._like)

    def remember(self, batch: int, rollout: Rollout) -> None:
        """Keeps the answers where drafts look through them: in every process those of all, so that
        a resumed run may divide otherwise."""
        group, past = self._group, self.history.past
        if not past:
            return
        problems = self._training_problems(batch, self._owned_prompts())
        rows = np.asarray(
            [place * group + member for place in problems for member in range(min(group, past))],
            np.int32,
        )
        tokens, starts, ends = (
            meshes.local_rows(leaf, rows)
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        width = self._job.step.generator.settings.max_new_tokens
        table = np.zeros((len(self._owned), 1 + width), np.int32)
        for row, text, start, end in zip(rows, tokens, starts, ends, strict=True):
            table[row, 0], table[row, 1 : 1 + end - start] = end - start, text[start:end]
        table = meshes.sum_over_processes(table)
        for place, problem in self._training_problems(batch, np.ones(self._prompts, bool)).items():
            answers = table[place * group : place * group + min(group, past)]
            self.history.keep(problem.index, [answer[1 : 1 + answer[0]] for answer in answers])

    def _score(self, problems: dict[int, Problem], rollout: Rollout, trains: bool) -> Scored:
        job, group = self._job, self._group
        rows = np.asarray(
            [place * group + member for place in problems for member in range(group)], np.int32
        )
        leaves = rollout.prompt_lengths, rollout.lengths, rollout.status, rollout.statistics.rounds
        starts, ends, status, rounds = (meshes.local_rows(leaf, rows) for leaf in leaves)
        ahead, self._ahead = self._ahead, Ahead()
        left = ahead.left(rows.tolist())
        try:
            ahead.begin(self._scorer, left, self._asked(problems, rollout, left))
            scores, broken = ahead.end(self._scorer), False
        except PoolError as error:  # every process ends then, at the same place
            scores, broken = nothing_known(len(rows), str(error)), True
        ended = np.isin(status, (EOS, LENGTH))
        has_reward = ended & scores.known
        overlong, longest = job.config.overlong, job.config.rollout.max_new_tokens
        lost = overlong_penalty(ends - starts, longest, overlong.buffer, overlong.penalty)
        # One row of the table a reward, one whether it counts, one the tokens to read, one what
        # length takes from the reward, one for each outcome, one whether the pool is broken, one
        # whether it ended; zeros where another process fills in.
        table = np.zeros((6 + len(Outcome), len(self._owned)), np.float32)
        table[0, rows], table[1, rows] = np.where(has_reward, scores.rewards, 0), has_reward
        table[2, rows] = self._read(ends, status, has_reward)
        table[3, rows] = np.where(has_reward, lost, 0)
        for outcome in Outcome:
            table[4 + outcome, rows] = ended & (scores.outcomes == outcome)
        table[-2, rows], table[-1, rows] = broken, ended
        table = meshes.sum_over_processes(table)
        count = float(table[-1].sum())
        reason = scores.reason or "another process knows why"
        if table[-2].any():
            raise Diverged(
                f"rewards cannot be found any more: {reason}. The same command goes on from the"
                " newest checkpoint"
            )
        self._require_few(count - float(table[1].sum()), count, reason, trains)
        counted = float(table[1].sum()) or math.nan
        plan, like = self._planned(table[2]), self._finished
        # where overlong.filter leaves nothing to read, that is no fault of the update
        learn = bool(table[2].any() or not table[1].any())
        rewards, valid, learn = put(
            (table[0] + table[3], table[1] > 0, learn), (like.rewards, like.valid, like.learn)
        )
        sampled = range(0, len(rows), group)
        read = self._asked(problems, rollout, rows[sampled].tolist())
        samples = [
            {
                "prompt": prompt,
                "response": response,
                "answer": answer,
                "reward": float(scores.rewards[row]) if scores.known[row] else None,
                "outcome": Outcome(scores.outcomes[row]).name.lower(),
                "rounds": int(rounds[row]),
            }
            for row, prompt, response, answer in zip(sampled, *read[:3], strict=True)
        ]
        shares = {
            _share(outcome): float(table[4 + outcome].sum()) / (count or math.nan)
            for outcome in Outcome
        }
        if overlong.buffer:
            shares["reward/overlong"] = float(table[3].sum()) / counted
        differing = dynamic_sampling.differing(table[0], table[1] > 0, group)
        finished = Finished(rollout=rollout, rewards=rewards, valid=valid, plan=plan, learn=learn)
        reward = float(table[0].sum()) / counted
        return Scored(finished, reward, shares, samples, differing)

    def begin_scoring(self, rollout: Rollout) -> None:
        """Has the workers begin with rows of the training rollout that have ended, while others
        still generate."""
        if not self._scorer.has_workers:
            return
        problems = self._training_problems(self._asking, self._owned_prompts())
        rows = np.flatnonzero(self._owned).astype(np.int32)
        ended = np.isin(meshes.local_rows(rollout.status, rows), (EOS, LENGTH))
        if ready := self._ahead.left(rows[ended].tolist()):
            with contextlib.suppress(PoolError):  # it is told of at the end, by all processes
                self._ahead.begin(self._scorer, ready, self._asked(problems, rollout, ready))

    def _asked(self, problems: dict[int, Problem], rollout: Rollout, rows: list[int]) -> Rows:
        """Problems and responses of some rows."""
        tokens, starts, ends = (
            meshes.local_rows(leaf, np.asarray(rows, np.int32))
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        texts = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
        asked = [problems[row // self._group] for row in rows]
        return Rows(
            [problem.prompt for problem in asked],
            [self._job.tokenizer.decode(text) for text in texts],
            [problem.answer for problem in asked],
            [problem.columns for problem in asked],
        )

    def _require_few(self, failed: float, rows: float, reason: str, trains: bool) -> None:
        """Whether nothing is known of few rows of a rollout, which are left out."""
        if not failed:
            return
        most = self._job.config.reward.max_failed
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
