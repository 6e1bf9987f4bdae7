"""Trains a draft offline.

`python -m jaxspec.train_draft --config draft_offline.py`
"""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import json
from typing import Any

import jax
from rich import box
from rich.console import Group
from rich.table import Table

from jaxspec.config.algorithms import collect_draft_warnings
from jaxspec.config.unused import DRAFT_SETTINGS
from jaxspec.data.problems import describe_problems, load_sets
from jaxspec.host.job import Job, run_program
from jaxspec.inputs.checked import ConfigError
from jaxspec.preparation import draft_data
from jaxspec.preparation.draft import ACCEPTANCE, get_or_train_draft
from jaxspec.preparation.draft_training import acceptance_lengths
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Screen

ABOUT = "Trains a draft on responses of the policy or on a text, and measures its acceptance."


def build_acceptance_table(outcome: dict[str, Any], depths: int) -> Group:
    """Builds the table of a draft's acceptance at the first `depths` depths.

    `outcome` is the record of the draft's training.
    """
    table = Table(box=box.SIMPLE)
    for title in ("depth", "expected acceptance", "tokens a round"):
        table.add_column(title, justify="right")
    acceptance = outcome["acceptance"][:depths]
    for depth, (probability, token_count) in enumerate(
        zip(acceptance, acceptance_lengths(acceptance), strict=True), start=1
    ):
        table.add_row(f"{depth}", f"{probability:.3f}", f"{token_count:.2f}")
    remark = (
        "measured after true tokens only, hence at one depth" if outcome["kind"] == "model" else ""
    )
    if outcome["vocabulary"]:
        remark = (
            f"its {outcome['vocabulary']} tokens are {outcome['coverage']:.2%} of those responses,"
            " which caps acceptance"
        )
    return Group(
        f"{outcome['kind']} on {outcome['responses']} held-out responses of the policy",
        table,
        remark,
    )


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains the draft, and prints acceptance and path.

    A draft in the cache is not trained again. Returns the exit status.
    """
    draft, training = job.config.rollout.draft, job.config.draft_training
    if job.config.offline.steps == 0 or not draft.is_learned:
        cause = (
            f"offline.steps is {job.config.offline.steps} and rollout.draft.kind is {draft.kind}"
        )
        raise ConfigError(
            f"{cause}, so there is nothing to train; set --offline.steps, and a kind with weights"
            " (eagle3, mtp, model)"
        )
    # Bad data is reported before any training.
    with interrupt.exit_on_signal("reading the data"):
        sets = load_sets(job.config, job.tokenizer, require_answers=False)
        for line in (*collect_draft_warnings(job.config), *describe_problems(job.config, sets)):
            job.say(line)
        text = draft_data.read_training_text(job.config, job.tokenizer, job.say)
    weights = get_or_train_draft(job.config, job.step, job.tokenizer, text, interrupt, job.say)
    if jax.process_index() == 0:
        outcome = json.loads(weights.with_name(ACCEPTANCE).read_text(encoding="utf-8"))
        Screen().print(
            build_acceptance_table(outcome, max(training.ttt_steps, draft.max_draft_length))
        )
    job.say(f"draft: {weights}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("train_draft", ABOUT, main, used_settings=DRAFT_SETTINGS))
