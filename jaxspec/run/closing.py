"""End of a run: the closing table."""

from pathlib import Path

import jax

from jaxspec.config.settings import ResolvedConfig
from jaxspec.host.comparison import compare_decoding
from jaxspec.host.prompts import PromptSource
from jaxspec.metrics.files import read_metrics
from jaxspec.processes.process_0 import broadcast_flag
from jaxspec.processes.roles import owns_part
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.stalls import make_stall_watch
from jaxspec.run.start import describe_random_draft
from jaxspec.run.state import RunState
from jaxspec.step import Step
from jaxspec.system.closing_table import (
    build_closing_table,
    describe_missing_batches,
    explain_missing_result,
)
from jaxspec.system.progress import Screen
from jaxspec.system.terminal import LinePrinter


def close_run(
    config: ResolvedConfig,
    step: Step,
    source: PromptSource,
    run: RunState,
    workdir: Path,
    say: LinePrinter,
    unsaved: str = "",
) -> int:
    """Prints the closing table, and returns the exit status.

    If `compare_plain` is set, the table compares speculation with plain decoding on the prompts of
    the last rollout.

    Raises:
      Diverged: the last batch or evaluation has no result, or the end of the run is not saved.
        `unsaved` has the reason.
    """
    summary: dict[str, float] = {}
    compares = config.compare_plain and step.generator.draft_length > 0
    if compares and not owns_part(step.generator.mesh):
        say("decoding is not compared with plain decoding, since other processes generate")
    elif compares:
        say("comparing with plain decoding of the last batch")
        result = compare_decoding(step, run.state, source.place_comparison(run.generated - 1))
        summary = {
            "rows": result.rows,
            "plain/passes": result.plain_passes,
            "spec/passes": result.spec_passes,
            "plain/seconds": result.plain_seconds,
            "spec/seconds": result.spec_seconds,
            "round_cost": result.round_cost,
        }
    failure = ""
    if unsaved:
        remedy = "the same command goes on from the newest checkpoint, with more --steps"
        failure = f"the end of the run is not saved, because {unsaved}; {remedy} beyond this end"
    # Only process 0 is sure to see the run's folder.
    if jax.process_index() == 0:
        records = read_metrics(workdir)
        if gap := describe_missing_batches(records, run.next_batch):
            say(f"warning: {gap}")
        stall_signs = make_stall_watch(config, records).lasting_signs()
        Screen().print(build_closing_table(records, summary, stall_signs))
        failure = "; ".join(filter(None, (explain_missing_result(records), failure)))
    if remark := describe_random_draft(config):
        say(remark)
    if broadcast_flag(bool(failure)):
        raise Diverged(failure or "the run ended without a result; process 0 says which")
    return 0
