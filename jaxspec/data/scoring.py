"""Scorers and judge of a run's rollouts.

Scorers are built from the config, and tried on the problems before a run starts.
"""

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from jaxspec.config.settings import ResolvedConfig, RewardConfig, SetConfig
from jaxspec.data.problem_source import Problem, Problems
from jaxspec.data.problems import ProblemSets
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_value, join_names
from jaxspec.processes import global_arrays
from jaxspec.processes.devices import core_count
from jaxspec.rewards.code import SANDBOXES
from jaxspec.rewards.extract import Style
from jaxspec.rewards.outcome import Scores, make_invalid_scores
from jaxspec.rewards.pool import PoolError, RewardPool
from jaxspec.rewards.scorer import RewardInputs, ScoreCollector, Scorer, SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import EOS, LENGTH, Rollout
from jaxspec.tokens.tokenizer import Tokenizer

MAX_DEFAULT_WORKERS = 8
"""Maximum number of worker processes if `reward.workers` is 0."""
_WORKERS_PER_CORE = 4
"""Maximum number of processes per core. More would only wait for each other."""
_BYTES_PER_WORKER = 2**29
"""Bytes of memory that a process needs."""
_TRIAL_RESPONSES: dict[Style, str] = {
    "hash": "# ANSWER",
    "boxed": "\\boxed{ANSWER}",
    "answer_line": "Answer: ANSWER",
    "either": "\\boxed{ANSWER}",
    "dapo": "Answer: ANSWER",
    "number": "The answer is ANSWER.",
    "code": "```python\npass\n```",
}
"""Responses for trial calls of a user's function, by answer style."""
# Not a setting, since it concerns a machine and not a run.
WITHOUT_SANDBOX = "JAXSPEC_WITHOUT_SANDBOX"
"""Environment variable that allows programs to run without a sandbox."""
_MAX_LISTED_ROWS = 5
"""Maximum number of rows named in a message."""


def make_scorers(config: ResolvedConfig) -> SetScorers:
    """Makes the scorers of all sets of problems.

    Returns once their workers have started.

    Raises:
      ConfigError: a user's function cannot be imported, or does not take the arguments it would be
        given. Or a verifier is not installed, or fails its test cases.
    """
    pools: dict[str, RewardPool] = {}
    remarks: list[str] = []
    scorers = [
        _make_scorer(prefix, set_config, pools, remarks)
        for prefix, set_config in config.sets_by_prefix.items()
    ]
    return SetScorers(scorers, remarks)


def try_scorers(config: ResolvedConfig, sets: ProblemSets, scorers: SetScorers) -> None:
    """Tries the scorers of a run on its problems.

    Raises:
      ConfigError: a verifier cannot read some reference answers, which are listed. Or a user's
        function gives no reward for trial responses to a problem. Or the workers fail.
    """
    named_sets = [*config.sets_by_prefix.items()]
    for number, problems in sets.enumerate_sets():
        prefix, set_config = named_sets[number]
        with _explain_pool_errors(prefix, set_config.reward.function):
            _require_readable_references(prefix, set_config.reward, scorers[number], problems)
            if len(problems):
                _require_trial_rewards(prefix, set_config, scorers[number], problems[0])


@contextlib.contextmanager
def _explain_pool_errors(prefix: str, function: str) -> Iterator[None]:
    """Names the setting whose workers failed.

    Args:
      prefix: text before the name of the setting.
      function: the user's function that the workers call. Empty if they only verify.

    Raises:
      ConfigError: the pool fails in the context.
    """
    try:
        yield
    except PoolError as error:
        setting = f"reward.function {function}" if function else "reward.verifier"
        raise ConfigError(f"{prefix}{setting}: {error}") from error


def _make_scorer(
    prefix: str, set_config: SetConfig, pools: dict[str, RewardPool], remarks: list[str]
) -> Scorer:
    """Makes the scorer of a set of problems.

    Args:
      prefix: text before the names of settings in messages.
      set_config: config of the set.
      pools: pools of workers by user's function, to which a new pool is added.
      remarks: report lines for the user, to which new ones are added.
    """
    settings, function = set_config.reward, set_config.reward.function
    needs_verifier = settings.verifier != "exact" and "answer" in settings.all_parts
    require(
        settings.verifier != "math" or importlib.util.find_spec("math_verify") is not None,
        f"{prefix}reward.verifier math needs math-verify, which is not installed: in a checkout run"
        f" bash launch/venv.sh math, elsewhere pip install math-verify; or set"
        f" --{prefix}reward.verifier exact",
    )
    # A worker imports a single function, so sets share a pool only if they share the function.
    if (needs_verifier or function) and function not in pools:
        workers = choose_worker_count(settings.workers)
        pools[function] = RewardPool(workers, settings.deadline, function)
    pool = pools[function] if needs_verifier or function else None
    style, reward_parts = set_config.data.answer_style, settings.all_parts
    scorer = Scorer(
        style, reward_parts, settings.all_weights, pool, settings.verifier, settings.rows
    )
    with _explain_pool_errors(prefix, function):
        if pool is not None:
            # The first call of a pool also reports an import that failed.
            [call_form] = pool([["form"]])
            if call_form and "function" in reward_parts:
                remarks.append(f"{prefix}reward.function {function} is called in {call_form}")
        # A call without rows runs only the test cases of the verifier.
        scorer(RewardInputs((), (), (), ()))
        if pool is not None and needs_verifier and settings.verifier == "code":
            [sandbox] = pool([["sandbox"]])
            _require_sandbox(prefix, sandbox)
            remarks.append(f"{prefix}reward.verifier code runs programs in {SANDBOXES[sandbox]}")
    return scorer


def _require_sandbox(prefix: str, sandbox: str) -> None:
    require(
        bool(sandbox) or os.environ.get(WITHOUT_SANDBOX) == "1",
        f"{prefix}reward.verifier code finds no sandbox for programs that the policy writes:"
        " neither namespaces nor bubblewrap work here (docs/rewards.md); run it where they do, or,"
        f" on a machine that has nothing to lose, set {WITHOUT_SANDBOX}=1 in the"
        " environment",
    )


def choose_worker_count(requested: int) -> int:
    """Returns the number of worker processes.

    Args:
      requested: value of `reward.workers`, where 0 stands for the default.

    Raises:
      ConfigError: more processes are requested than this machine can run.
    """
    cores = core_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    max_workers = max(1, min(_WORKERS_PER_CORE * cores, memory // _BYTES_PER_WORKER))
    require(
        requested <= max_workers,
        f"reward.workers is {requested}, and this machine, with {cores} cores and"
        f" {memory / 2**30:.0f} GiB of memory, runs at most {max_workers}"
        f" ({_WORKERS_PER_CORE} for each core, {_BYTES_PER_WORKER // 2**20} MiB for each); set"
        f" --reward.workers {max_workers} or less",
    )
    # The default leaves a core to this process.
    return requested or min(MAX_DEFAULT_WORKERS, max(1, cores - 1), max_workers)


def _require_readable_references(
    prefix: str, settings: RewardConfig, scorer: Scorer, problems: Problems
) -> None:
    """Raises ConfigError for unreadable reference answers, and PoolError if workers failed."""
    if settings.verifier == "exact" or "answer" not in settings.all_parts:
        return
    locations, answers = zip(*problems.iter_references(), strict=True)
    unreadable = scorer.find_unreadable_answers(answers)
    examples = [
        f"{locations[row]}: {format_value(answers[row])}"
        for row in itertools.islice(unreadable, _MAX_LISTED_ROWS)
    ]
    require(
        not unreadable,
        f"{len(unreadable)} reference answers cannot be read by {prefix}reward.verifier"
        f" {settings.verifier}:"
        f" {join_names(examples)}{' and others' * (len(unreadable) > _MAX_LISTED_ROWS)}; correct or"
        " remove them, or choose another verifier",
    )


def _require_trial_rewards(
    prefix: str, set_config: SetConfig, scorer: Scorer, problem: Problem
) -> None:
    """Raises ConfigError if a user's function fails a trial, and PoolError if workers failed."""
    # A function must handle responses without an answer too, such as those that are cut.
    style, reward = set_config.data.answer_style, set_config.reward
    answer_response = _TRIAL_RESPONSES[style].replace("ANSWER", problem.answer)
    # A function that takes one row per call gets the first response only.
    responses = [answer_response, "I do not know."][: reward.rows]
    count, response_text = len(responses), " and ".join(map(format_value, responses))
    reason = scorer.try_function(
        RewardInputs(
            [problem.prompt] * count,
            responses,
            [problem.answer] * count,
            [problem.columns] * count,
        )
    )
    require(
        not reason,
        f"{prefix}reward.function {reward.function} was tried on the responses {response_text} to"
        f" problem {problem.index + 1}: {reason}; fix the function"
        + (", or raise --reward.deadline" if "exceeded reward.deadline" in reason else ""),
    )


class RolloutScores(NamedTuple):
    """Scores of this process's rows, grouped by problem."""

    rows: Int32[np.ndarray, " rows"]
    """Row numbers in the rollout."""
    problems: list[Problem]
    """Problem of each row."""
    requests: RewardInputs
    """Inputs of the rewards of each row."""
    scores: Scores
    prompt_lengths: Int32[np.ndarray, " rows"]
    """Tokens of the prompt."""
    lengths: Int32[np.ndarray, " rows"]
    """Tokens of prompt and response."""
    status: Int32[np.ndarray, " rows"]
    rounds: Int32[np.ndarray, " rows"]
    """Target passes that generated the response."""

    @property
    def is_complete(self) -> Bool[np.ndarray, " rows"]:
        """Rows that ended or reached the maximum length."""
        return np.isin(self.status, (EOS, LENGTH))

    @property
    def has_reward(self) -> Bool[np.ndarray, " rows"]:
        """Rows that have a reward."""
        return self.is_complete & self.scores.valid


class Judge:
    """Scores the rows of rollouts. Each process scores its own rows.

    Args:
      scorers: scorers by number of the set of problems.
      tokenizer: tokenizer that decodes responses.
      group_size: rows of each prompt.
    """

    def __init__(self, scorers: SetScorers, tokenizer: Tokenizer, group_size: int) -> None:
        self._scorers, self._tokenizer, self._group_size = scorers, tokenizer, group_size
        self._collector = ScoreCollector()
        self.has_workers = scorers.has_workers
        """Whether workers compute rewards. If so, an early start saves time."""

    def start_scoring(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Int32[np.ndarray, " rows"]
    ) -> None:
        """Submits finished rows to the workers.

        Args:
          problems: problems of this process, by place among the prompts.
          rollout: rollout that is being generated.
          rows: rows of this process.
        """
        is_complete = np.isin(global_arrays.read_local_rows(rollout.status, rows), (EOS, LENGTH))
        ready_rows = self._collector.select_unsubmitted_rows(rows[is_complete].tolist())
        if ready_rows:
            # An error here would stop one process only. `__call__` reports it on all of them.
            with contextlib.suppress(PoolError):
                self._submit_rows(problems, rollout, ready_rows)

    def __call__(self, problems: Mapping[int, Problem], rollout: Rollout) -> RolloutScores:
        """Scores the rows of this process.

        It waits for rows that `start_scoring` submitted, and submits the others.

        Raises:
          Diverged: rewards can no longer be computed. All processes raise it together.
        """
        prompt_indices = np.asarray(list(problems), np.int32)
        rows = (
            prompt_indices[:, None] * self._group_size + np.arange(self._group_size, dtype=np.int32)
        ).ravel()
        fields = rollout.prompt_lengths, rollout.lengths, rollout.status, rollout.statistics.rounds
        prompt_lengths, lengths, status, rounds = (
            global_arrays.read_local_rows(leaf, rows) for leaf in fields
        )
        try:
            self._submit_rows(
                problems, rollout, self._collector.select_unsubmitted_rows(rows.tolist())
            )
            scores, is_broken = self._collector.collect_scores(), False
        except PoolError as error:
            scores, is_broken = make_invalid_scores(len(rows), str(error)), True
        # A new collector, since the rows of the next rollout have the same numbers.
        self._collector = ScoreCollector()
        # All processes must stop together: one that goes on would wait for the others forever.
        if global_arrays.sum_over_processes(np.asarray([is_broken], np.float32))[0]:
            raise Diverged(
                "rewards can no longer be computed:"
                f" {scores.reason or 'another process knows why'}. The same command goes on from"
                " the newest checkpoint"
            )
        row_problems, requests = self._collect_requests(problems, rollout, rows.tolist())
        return RolloutScores(
            rows, row_problems, requests, scores, prompt_lengths, lengths, status, rounds
        )

    def _submit_rows(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Sequence[int]
    ) -> None:
        row_problems, requests = self._collect_requests(problems, rollout, rows)
        self._collector.submit_rows(
            self._scorers, rows, requests, [problem.set_number for problem in row_problems]
        )

    def _collect_requests(
        self, problems: Mapping[int, Problem], rollout: Rollout, rows: Sequence[int]
    ) -> tuple[list[Problem], RewardInputs]:
        """Returns problems and reward inputs of rows."""
        tokens, prompt_lengths, lengths = (
            global_arrays.read_local_rows(leaf, np.asarray(rows, np.int32))
            for leaf in (rollout.tokens, rollout.prompt_lengths, rollout.lengths)
        )
        texts = [
            row[prompt_length:length]
            for row, prompt_length, length in zip(tokens, prompt_lengths, lengths, strict=True)
        ]
        row_problems = [problems[row // self._group_size] for row in rows]
        return row_problems, RewardInputs(
            [problem.prompt for problem in row_problems],
            [self._tokenizer.decode(text) for text in texts],
            [problem.answer for problem in row_problems],
            [problem.columns for problem in row_problems],
        )
