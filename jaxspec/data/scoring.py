"""What judges the responses of a run: made of its config and its data, and asked for the rows of a
rollout."""

import contextlib
import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jaxspec import mesh as meshes
from jaxspec.config.settings import ResolvedConfig, RewardConfig, SetConfig
from jaxspec.data.problem_source import Problem, Problems
from jaxspec.data.problems import ProblemSets
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import listed, shown
from jaxspec.rewards.outcome import Scores, nothing_known
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import Ahead, Rows, Scorer, SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import EOS, LENGTH, Rollout
from jaxspec.tokens.tokenizer import Tokenizer

MOST_WORKERS = 8
"""Processes where nothing says how many."""
_LISTED = 5
"""Rows named in a message."""


def scorer_of(config: ResolvedConfig, sets: ProblemSets | None = None) -> SetScorers:
    """What judges the responses of a run; its workers, if it has any, are ready, and can read all
    reference answers of the sets.

    Raises:
      ConfigError: a user's function cannot be imported; a verifier is not installed or not sound;
        it cannot read some answers, which are listed.
    """
    pools: dict[str, RewardPool] = {}
    named = [*config.judged_sets.items()]
    scorers = [_of_set(where, each, pools) for where, each in named]
    for number, problems in sets.with_judges() if sets else ():
        where, each = named[number]
        _require_readable(where, each.reward, scorers[number], problems)
    return SetScorers(scorers)


def _of_set(where: str, each: SetConfig, pools: dict[str, RewardPool]) -> Scorer:
    """What judges the responses to a set of problems; those with the same function share a pool of
    workers. `where` comes before the names of settings in messages."""
    settings, function = each.reward, each.reward.function
    verifies = settings.verifier != "exact" and "answer" in settings.all_parts
    require(
        settings.verifier != "math" or importlib.util.find_spec("math_verify") is not None,
        f"{where}reward.verifier math needs math-verify, which is not installed: in a checkout run"
        f" bash launch/venv.sh math, elsewhere pip install math-verify; or set"
        f" --{where}reward.verifier exact",
    )
    if (verifies or function) and function not in pools:
        workers = settings.workers or min(MOST_WORKERS, max(1, meshes.cores() - 1))
        pools[function] = RewardPool(workers, settings.deadline, function)
    pool = pools[function] if verifies or function else None
    style, parts = each.data.answer_style, settings.all_parts
    scorer = Scorer(style, parts, settings.all_weights, pool, settings.verifier, settings.rows)
    try:
        if pool is not None:
            pool([])  # hears whether the function was imported
        scorer(Rows((), (), (), ()))
    except PoolError as error:
        what = f"reward.function {function}" if function else "reward.verifier"
        raise ConfigError(f"{where}{what}: {error}") from error
    return scorer


def _require_readable(
    where: str, settings: RewardConfig, scorer: Scorer, problems: Problems
) -> None:
    """Refuses reference answers that a set's verifier cannot read."""
    if settings.verifier == "exact" or "answer" not in settings.all_parts:
        return
    places, answers = zip(*problems.references(), strict=True)
    bad = scorer.unreadable(answers)
    first = [f"{places[row]}: {shown(answers[row])}" for row in itertools.islice(bad, _LISTED)]
    require(
        not bad,
        f"{len(bad)} reference answers cannot be read by {where}reward.verifier"
        f" {settings.verifier}: {listed(first)}{' and others' * (len(bad) > _LISTED)}; correct or"
        " remove them, or choose another verifier",
    )


class Judged(NamedTuple):
    """What this process's rows of a rollout earn: all answers to its problems, problem by
    problem."""

    rows: Int32[np.ndarray, " rows"]
    """Their numbers."""
    problems: list[Problem]
    """Of each row."""
    asked: Rows
    scores: Scores
    starts: Int32[np.ndarray, " rows"]
    """Tokens of the prompt."""
    ends: Int32[np.ndarray, " rows"]
    """Tokens of prompt and response."""
    status: Int32[np.ndarray, " rows"]
    rounds: Int32[np.ndarray, " rows"]
    """Target passes that the response took."""

    @property
    def ended(self) -> Bool[np.ndarray, " rows"]:
        """Rows that did not fail."""
        return np.isin(self.status, (EOS, LENGTH))

    @property
    def rewarded(self) -> Bool[np.ndarray, " rows"]:
        """Rows that have a reward."""
        return self.ended & self.scores.known


class Judge:
    """Finds what rows of rollouts earn; each process sees to its own rows.

    Args:
      scorers: by number of the set of problems.
      tokenizer: turns responses into text.
      group: rows of each prompt.
    """

    def __init__(self, scorers: SetScorers, tokenizer: Tokenizer, group: int) -> None:
        self._scorers, self._tokenizer, self._group = scorers, tokenizer, group
        self._ahead = Ahead()
        self.has_workers = scorers.has_workers
        """Whether anything is gained by beginning early."""

    def begin(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Int32[np.ndarray, " rows"]
    ) -> None:
        """Has the workers begin with those of some rows that have ended; `problems` are those of
        this process, by their place among the prompts."""
        ended = np.isin(meshes.local_rows(rollout.status, rows), (EOS, LENGTH))
        ready = self._ahead.left(rows[ended].tolist())
        if ready:
            with contextlib.suppress(PoolError):  # it is told of at the end, by all processes
                self._begin(problems, rollout, ready)

    def __call__(self, problems: Mapping[int, Problem], rollout: Rollout) -> Judged:
        """What the answers to this process's problems earn, with some of which it may have begun.

        Raises:
          Diverged: rewards cannot be found any more; in every process then, at the same place.
        """
        places = np.asarray(list(problems), np.int32)
        rows = (places[:, None] * self._group + np.arange(self._group, dtype=np.int32)).ravel()
        leaves = rollout.prompt_lengths, rollout.lengths, rollout.status, rollout.statistics.rounds
        starts, ends, status, rounds = (meshes.local_rows(leaf, rows) for leaf in leaves)
        try:
            self._begin(problems, rollout, self._ahead.left(rows.tolist()))
            scores, broken = self._ahead.end(), False
        except PoolError as error:
            scores, broken = nothing_known(len(rows), str(error)), True
        self._ahead = Ahead()
        if meshes.sum_over_processes(np.asarray([broken], np.float32))[0]:
            raise Diverged(
                f"rewards cannot be found any more: {scores.reason or 'another process knows why'}."
                " The same command goes on from the newest checkpoint"
            )
        chosen, asked = self._asked(problems, rollout, rows.tolist())
        return Judged(rows, chosen, asked, scores, starts, ends, status, rounds)

    def _begin(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Sequence[int]
    ) -> None:
        chosen, asked = self._asked(problems, rollout, rows)
        self._ahead.begin(self._scorers, rows, asked, [problem.judge for problem in chosen])

    def _asked(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Sequence[int]
    ) -> tuple[list[Problem], Rows]:
        """The problem of each of some rows, and what is judged of them."""
        tokens, starts, ends = (
            meshes.local_rows(leaf, np.asarray(rows, np.int32))
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        texts = [row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)]
        asked = [problems[row // self._group] for row in rows]
        return asked, Rows(
            [problem.prompt for problem in asked],
            [self._tokenizer.decode(text) for text in texts],
            [problem.answer for problem in asked],
            [problem.columns for problem in asked],
        )
