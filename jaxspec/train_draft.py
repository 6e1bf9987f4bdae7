"""Offline training of the draft on the policy's own responses: `python -m jaxspec.train_draft
--config draft_offline.py`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import begin

    begin()

import json
from typing import Any

import jax
from rich import box
from rich.console import Group
from rich.table import Table

from jaxspec.config.algorithms import draft_remarks
from jaxspec.config.unused import OF_DRAFT
from jaxspec.data.problems import load_sets, remarks
from jaxspec.host import draft_data
from jaxspec.host.draft_training import ACCEPTANCE, cached_draft, tokens_kept
from jaxspec.host.job import Job, run
from jaxspec.inputs.checked import ConfigError
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Screen

ABOUT = "Trains the draft, on responses sampled from the policy or on a text, and measures it."


def closing_table(outcome: dict[str, Any], depths: int) -> Group:
    """What a draft reached on held-out responses, as `build` stored it, for the first `depths`
    depths; for rich to print."""
    table = Table(box=box.SIMPLE)
    for title in ("depth", "expected acceptance", "tokens a round"):
        table.add_column(title, justify="right")
    acceptance = outcome["acceptance"][:depths]
    for depth, (share, kept) in enumerate(
        zip(acceptance, tokens_kept(acceptance), strict=True), start=1
    ):
        table.add_row(f"{depth}", f"{share:.3f}", f"{kept:.2f}")
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
    """Trains the draft, or finds it in the cache; says where it is and what it has reached."""
    draft, training = job.config.rollout.draft, job.config.draft_training
    if job.config.offline.steps == 0 or not draft.learned:
        either = (
            f"offline.steps is {job.config.offline.steps} and rollout.draft.kind is {draft.kind}"
        )
        raise ConfigError(
            f"{either}, so there is nothing to train; set --offline.steps, and a kind with weights"
            " (eagle3, mtp, model)"
        )
    # bad data is named before any work
    with interrupt.nothing_unsaved("reading the data"):
        sets = load_sets(job.config, job.tokenizer, answers=False)
        for line in (*draft_remarks(job.config), *remarks(job.config, sets)):
            job.say(line)
        text = draft_data.training_text(job.config, job.tokenizer, job.say)
    weights = cached_draft(job, interrupt, text)
    if jax.process_index() == 0:
        outcome = json.loads(weights.with_name(ACCEPTANCE).read_text(encoding="utf-8"))
        Screen().print(closing_table(outcome, max(training.ttt_steps, draft.max_draft_length)))
    job.say(f"draft: {weights}")
    return 0


if __name__ == "__main__":
    sys.exit(run("train_draft", ABOUT, main, used=OF_DRAFT))
