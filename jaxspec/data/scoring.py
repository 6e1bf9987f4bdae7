"""What judges the responses of a run: made of its config and its data, and asked for the rows of a
rollout."""

import contextlib
import importlib.util
import itertools
import os
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
from jaxspec.rewards.code import SANDBOXES
from jaxspec.rewards.extract import Style
from jaxspec.rewards.outcome import Scores, nothing_known
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import Ahead, Rows, Scorer, SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import EOS, LENGTH, Rollout
from jaxspec.tokens.tokenizer import Tokenizer

MOST_WORKERS = 8
"""Processes where nothing says how many."""
_BY_CORE = 4
"""Processes for each core, at most; more of them wait for one another."""
_BYTES = 2**29
"""Memory for each process, at least."""
_STATED: dict[Style, str] = {
    "hash": "# ANSWER",
    "boxed": "\\boxed{ANSWER}",
    "answer_line": "Answer: ANSWER",
    "either": "\\boxed{ANSWER}",
    "dapo": "Answer: ANSWER",
    "number": "The answer is ANSWER.",
    "code": "```python\npass\n```",
}
"""Responses that a user's function is tried on."""
# It is said of a machine, not of a run, so it is no setting.
WITHOUT_SANDBOX = "JAXSPEC_WITHOUT_SANDBOX"
"""Variable of the environment that lets programs run where no sandbox works."""
_LISTED = 5
"""Rows named in a message."""


def scorer_of(config: ResolvedConfig) -> SetScorers:
    """What judges the responses of a run; its workers, if it has any, are ready.

    Raises:
      ConfigError: a user's function cannot be imported, or does not take what it would be given; a
        verifier is not installed or not sound.
    """
    pools: dict[str, RewardPool] = {}
    remarks: list[str] = []
    scorers = [_of_set(where, each, pools, remarks) for where, each in config.judged_sets.items()]
    return SetScorers(scorers, remarks)


def try_scorers(config: ResolvedConfig, sets: ProblemSets, scorers: SetScorers) -> None:
    """Tries what judges a run on its problems.

    Raises:
      ConfigError: a verifier cannot read some reference answers, which are listed; a user's
        function gives no reward for made-up responses to a problem.
    """
    named = [*config.judged_sets.items()]
    for number, problems in sets.with_judges():
        where, each = named[number]
        _require_readable(where, each.reward, scorers[number], problems)
        if len(problems):
            _require_rewarded(where, each, scorers[number], problems[0])


def _of_set(
    where: str, each: SetConfig, pools: dict[str, RewardPool], remarks: list[str]
) -> Scorer:
    """What judges the responses to a set of problems; those with the same function share a pool of
    workers. `where` comes before the names of settings in messages; adds to `remarks`."""
    settings, function = each.reward, each.reward.function
    verifies = settings.verifier != "exact" and "answer" in settings.all_parts
    require(
        settings.verifier != "math" or importlib.util.find_spec("math_verify") is not None,
        f"{where}reward.verifier math needs math-verify, which is not installed: in a checkout run"
        f" bash launch/venv.sh math, elsewhere pip install math-verify; or set"
        f" --{where}reward.verifier exact",
    )
    if (verifies or function) and function not in pools:
        workers = count_workers(settings.workers)
        pools[function] = RewardPool(workers, settings.deadline, function)
    pool = pools[function] if verifies or function else None
    style, parts = each.data.answer_style, settings.all_parts
    scorer = Scorer(style, parts, settings.all_weights, pool, settings.verifier, settings.rows)
    try:
        if pool is not None:
            # This also hears whether the function was imported.
            [form] = pool([["form"]])
            if form and "function" in parts:
                remarks.append(f"{where}reward.function {function} is called in {form}")
        scorer(Rows((), (), (), ()))
        if pool is not None and verifies and settings.verifier == "code":
            [sandbox] = pool([["sandbox"]])
            _require_sandbox(where, sandbox)
            remarks.append(f"{where}reward.verifier code runs programs in {SANDBOXES[sandbox]}")
    except PoolError as error:
        what = f"reward.function {function}" if function else "reward.verifier"
        raise ConfigError(f"{where}{what}: {error}") from error
    return scorer


def _require_sandbox(where: str, sandbox: str) -> None:
    require(
        bool(sandbox) or os.environ.get(WITHOUT_SANDBOX) == "1",
        f"{where}reward.verifier code finds no sandbox for programs that the policy writes:"
        " neither namespaces nor bubblewrap work here (docs/rewards.md); run it where they do, or,"
        f" on a machine that has nothing to lose, say so with {WITHOUT_SANDBOX}=1 in the"
        " environment",
    )


def count_workers(workers: int) -> int:
    """Returns the number of worker processes; `workers` is that of `reward.workers`.

    Raises:
      ConfigError: it is more than this machine can run.
    """
    cores = meshes.cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = max(1, min(_BY_CORE * cores, memory // _BYTES))
    require(
        workers <= most,
        f"reward.workers is {workers}, and this machine, with {cores} cores and"
        f" {memory / 2**30:.0f} GiB of memory, runs at most {most} ({_BY_CORE} for each core,"
        f" {_BYTES // 2**20} MiB for each); set --reward.workers {most} or less",
    )
    return workers or min(MOST_WORKERS, max(1, cores - 1), most)


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


def _require_rewarded(where: str, each: SetConfig, scorer: Scorer, problem: Problem) -> None:
    """Refuses a user's function that gives no reward for made-up responses to a problem: one that
    states the reference answer, and one that states none."""
    style, reward = each.data.answer_style, each.reward
    stated = _STATED[style].replace("ANSWER", problem.answer)
    responses = [stated, "I do not know."][: reward.rows]
    count, named = len(responses), " and ".join(map(shown, responses))
    reason = scorer.try_function(
        Rows(
            [problem.prompt] * count,
            responses,
            [problem.answer] * count,
            [problem.columns] * count,
        )
    )
    require(
        not reason,
        f"{where}reward.function {reward.function} was tried on the responses {named} to problem"
        f" {problem.index + 1}: {reason}; mend the function"
        + (", or raise --reward.deadline" if "not through in time" in reason else ""),
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
