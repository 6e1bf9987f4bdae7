"""What a batch's metrics should make somebody look at, in words; nothing where all is well."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 10
"""Batches in a row that must show a sign before it is reported."""
FALLS = 3
"""Evaluations in a row that must each be lower than the one before."""
STILL = 1e-9
"""Learning rates below this leave float32 weights as they are: half the spacing of numbers at the
usual weight, 0.02, is larger, and an update of AdamW or Muon is about as large as its rate."""
ENTROPY, ENTROPY_SHARE = 0.1, 0.1
"""An entropy has collapsed if it is below so many nats, and below this share of the first."""
LENGTH_SHARE = 0.2
"""Responses have collapsed if they are shorter than this share of the first, for less reward."""
_EVALUATION = re.compile(r"eval/(\S+/avg@\d+)")


def of_gap(line: Mapping[str, Any], limit: float) -> str:
    """Recorded logprobs that are, from this batch on, too far from the learner's to be reused."""
    factor = line.get("rollout/probability_factor", 0.0)
    if not factor > limit or line["learner/recompute"]:  # also where it is no number
        return ""
    return (
        f"warning: batch {line['step']}: probabilities that generation recorded differ from the"
        f" learner's by a factor of {factor:.3g} on average, which is above loss.reuse_below"
        f" {limit:g}: old logprobs are recomputed from now on"
    )


def of_acceptance(line: Mapping[str, Any], before: float, share: float) -> str:
    """A draft that is suddenly accepted less, by more than a share of the acceptance length
    `before`: nothing else would show it but seconds."""
    now = line.get("rollout/acceptance_length", 0.0)
    if now >= before * (1 - share):
        return ""
    return (
        f"warning: batch {line['step']}: acceptance_length fell from {before:.2f} to {now:.2f}, by"
        f" more than draft_training.alarm {share:g}. Look at loss/draft, grad_norm/draft and"
        " skipped/draft (did the draft's own update break it? a lower"
        " --draft_training.learning_rate), at grad_norm/policy and rollout/target_entropy (did the"
        " policy jump, or get less certain?), at rollout/coverage and"
        " rollout/expected_acceptance_1 (fewer drafts, as draft_length auto may choose, or worse"
        " ones?), and at samples.jsonl (other prompts?)"
    )


def of_short_batch(line: Mapping[str, Any], prompts: int) -> str:
    """A batch that all its rollouts did not fill."""
    groups = line.get("dynamic_sampling/groups", prompts)
    if groups >= prompts:
        return ""
    return (
        f"warning: batch {line['step']}: {line['dynamic_sampling/rollouts']} rollouts have only"
        f" {groups:g} groups whose rewards differ, of the {prompts} of a batch, and the policy"
        " learns from these alone;"
        " --dynamic_sampling.max_batches lets it look further, other problems or a larger"
        " --batch.group_size find more"
    )


@dataclass
class Spell:
    """A sign in consecutive batches or evaluations."""

    patience: int
    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""

    def __str__(self) -> str:
        """Where it was, and what it says."""
        if self.first == self.last:
            return f"batch {self.first}: {self.text}"
        return f"batches {self.first} to {self.last}: {self.text}"


class StallWatch:
    """Notices that a run cannot learn, from its batches' lines.

    Args:
      by_group: whether an answer is compared with others to its prompt alone.
      rate: the largest learning rate of the run.
    """

    def __init__(self, by_group: bool, rate: float) -> None:
        self._by_group, self._rate = by_group, rate
        self._lines = 0
        self._open: dict[str, Spell] = {}
        self._over: list[Spell] = []
        self._first: list[Mapping[str, Any]] = []
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=PATIENCE)
        self._evaluations: dict[str, list[float]] = {}
        """Values of each metric since it last rose."""

    def look(self, line: Mapping[str, Any]) -> list[str]:
        """Adds the next batch; returns the warnings that are due.

        A sign is reported when it has lasted for its patience, then twice as long, and so on.
        """
        self._lines += 1
        if len(self._first) < PATIENCE:
            self._first.append(line)
        self._recent.append(line)
        signs = self._of_rate() | self._of_rewards(line) | self._of_collapse()
        due = [*self._extended(signs, line["step"], PATIENCE)]
        due += self._extended(self._of_evaluations(line), line["step"], FALLS)
        return [f"warning: {spell}" for spell in due]

    def summary(self) -> list[str]:
        """Every sign that lasted; in a short run also one that every batch has shown."""
        spells = [*self._over, *self._open.values()]
        return [str(each) for each in spells if each.count >= min(each.patience, self._lines)]

    def _extended(self, signs: dict[str, str], step: int, patience: int) -> list[Spell]:
        """Continues the spells of `signs`, ends those without a text, and returns the due ones."""
        due = []
        for name, text in signs.items():
            spell = self._open.get(name)
            if not text:
                ended = self._open.pop(name, None)
                self._over += [ended] if ended and ended.count >= ended.patience else []
                continue
            if spell is None:
                spell = self._open[name] = Spell(patience, first=step)
            spell.count, spell.last, spell.text = spell.count + 1, step, text
            times, left = divmod(spell.count, patience)
            if not left and times & (times - 1) == 0:
                due.append(spell)
        return due

    def _of_rate(self) -> dict[str, str]:
        """A learning rate that changes nothing."""
        text = (
            f"the learning rate is at most {self._rate:.3g}, which leaves float32 weights as they"
            " are; see --optimizer.learning_rate and --optimizer.warmup_steps"
        )
        return {"rate": text if self._rate < STILL else ""}

    def _of_rewards(self, line: Mapping[str, Any]) -> dict[str, str]:
        """Rewards that do not tell answers apart; nothing is said of a batch without any."""
        mean, std = line.get("reward/mean"), line.get("reward/std")
        if mean is None or mean != mean:
            return {}
        equal, alike = std == 0, line.get("reward/frac_zero_std") == 1
        cause = _cause(line)
        return {
            "equal": f"all rewards are {mean:.3g}, so that no answer is better than another."
            f" {cause}"
            if equal
            else "",
            "groups": f"in no group do rewards differ (their mean is {mean:.3g}), so that nothing"
            f" is learned. {cause}"
            if alike and not equal and self._by_group
            else "",
        }

    def _of_collapse(self) -> dict[str, str]:
        """Entropy or length that is far below that of the first batches."""
        if self._lines < 2 * PATIENCE:
            return {}
        names = "entropy", "rollout/length_mean", "reward/mean"
        before, now = (
            {name: _mean(lines, name) for name in names} for lines in (self._first, self._recent)
        )
        flat = now["entropy"] < ENTROPY and now["entropy"] < ENTROPY_SHARE * before["entropy"]
        short = now["rollout/length_mean"] < LENGTH_SHARE * before["rollout/length_mean"]
        worse = now["reward/mean"] <= before["reward/mean"]
        return {
            "entropy": f"entropy has collapsed, from {before['entropy']:.3g} to"
            f" {now['entropy']:.3g} nats a token: answers to a prompt hardly differ any more. A"
            " lower --optimizer.learning_rate, a higher --loss.clip_high or --loss.entropy keep it"
            " up"
            if flat
            else "",
            "length": f"responses have collapsed, from {before['rollout/length_mean']:.0f} to"
            f" {now['rollout/length_mean']:.0f} tokens, and earn no more"
            f" ({before['reward/mean']:.3g} -> {now['reward/mean']:.3g}). Look at samples.jsonl: is"
            " a short answer rewarded by mistake? A lower --optimizer.learning_rate may help"
            if short and worse
            else "",
        }

    def _of_evaluations(self, line: Mapping[str, Any]) -> dict[str, str]:
        """Shares of correct held-out answers that are lower than the time before."""
        signs = {}
        for name, value in line.items():
            found = _EVALUATION.fullmatch(name)
            if found is None or value is None or value != value:
                continue
            series = self._evaluations.setdefault(name, [])
            if not series or value >= series[-1]:
                series.clear()
            series.append(value)
            signs[name] = (
                f"{found[1]} falls: {' > '.join(f'{each:.3g}' for each in series)}."
                f" --eval.keep_best {found[1]} keeps the best checkpoint of a run; a lower"
                " --optimizer.learning_rate or --kl.beta may hold it"
                if len(series) > 1
                else ""
            )
        return signs


def _mean(lines: Any, name: str) -> float:
    """Of the lines that have a number; NaN if none has."""
    values = [value for line in lines if (value := line.get(name)) is not None and value == value]
    return sum(values) / len(values) if values else float("nan")


def _cause(line: Mapping[str, Any]) -> str:
    """The likeliest reason why rewards are alike, with its remedy."""
    rows = sum(line.get(f"status/{name}", 0) for name in ("eos", "length", "failed"))
    if line.get("reward/no_answer", 0) > 0.5:
        cut = line.get("status/length", 0) / max(rows, 1)
        return (
            f"No answer was found in {line['reward/no_answer']:.0%} of the responses, of which"
            f" {cut:.0%} were cut: see --data.answer_style, --data.instruction,"
            " --rollout.max_new_tokens and samples.jsonl"
        )
    if line.get("reward/correct", 0) > 0.5:
        return "The problems are too easy for this policy: give harder ones"
    return (
        "The problems are too hard for this policy, or the reward does not see its answers: read"
        " samples.jsonl, and try easier problems, a larger --batch.group_size or a higher"
        " --rollout.temperature"
    )
