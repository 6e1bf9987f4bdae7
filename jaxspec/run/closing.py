"""End of a run: the closing table."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxspec.config.settings import ResolvedConfig
from jaxspec.host.comparison import SpeedComparison, compare_decoding
from jaxspec.host.programs import sync_weights
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
    receive_comparison: Callable[[], SpeedComparison] | None = None,
) -> int:
    """Prints the closing table, and returns the exit status.

    If `compare_plain` is set, the table compares speculation with plain decoding on the prompts of
    the last rollout. `receive_comparison` gets it from the processes that generate, if others do.

    Raises:
      Diverged: the last batch or evaluation has no result, or the end of the run is not saved.
        `unsaved` has the reason.
    """
    summary: dict[str, float] = {}
    result = _compare_with_plain(config, step, source, run, say, receive_comparison)
    if result is not None:
        summary = {
            "rows": result.rows,
            "plain/passes": result.plain_passes,
            "spec/passes": result.spec_passes,
            "plain/seconds": result.plain_seconds,
            "spec/seconds": result.spec_seconds,
            "round_cost": result.round_cost,
            "in_turn": config.schedule.lag == 0 or step.shares_devices,
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


def compares_with_plain(config: ResolvedConfig, step: Step) -> bool:
    """Returns whether the end of a run compares speculation with plain decoding."""
    return config.compare_plain and step.generator.draft_length > 0


def _compare_with_plain(
    config: ResolvedConfig,
    step: Step,
    source: PromptSource,
    run: RunState,
    say: LinePrinter,
    receive_comparison: Callable[[], SpeedComparison] | None,
) -> SpeedComparison | None:
    """Compares with plain decoding on the prompts of the last rollout, if it is wanted."""
    if not compares_with_plain(config, step):
        return None
    announcement = "comparing with plain decoding of the last batch"
    if owns_part(step.generator.mesh):
        say(announcement)
        prompts = source.place_comparison(run.generated - 1)
        return compare_decoding(step, sync_weights(step, run.state), prompts)
    if receive_comparison is None:
        say("decoding is compared only as a run ends, since other processes generate")
        return None
    say(announcement)
    return receive_comparison()
