"""Start of a run: first weights of policy and draft, and costs of its draft lengths."""

import time
from collections.abc import Callable

import jax
import numpy as np

from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.history import AnswerHistory
from jaxspec.host.job import Job, build_learner_step
from jaxspec.host.programs import abstract_arguments, times_real_rounds
from jaxspec.host.prompts import PromptSource
from jaxspec.host.round_cost import fill_length_chooser
from jaxspec.inputs.checked import require
from jaxspec.preparation.draft import get_or_train_draft
from jaxspec.preparation.draft_data import TextRows, read_training_text
from jaxspec.preparation.policy import load_draft, load_policy, report_agreement
from jaxspec.processes.devices import describe_machine
from jaxspec.processes.process_0 import broadcast_flag
from jaxspec.rollout.feedback import length_chooser
from jaxspec.run.batches import BatchSource, is_evaluation_due
from jaxspec.run.state import GenerationProgress, RunState
from jaxspec.state import LengthChooser, NetworkState, NoChooser, Prompts, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import load_tree
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import Tokenizer


def read_offline_text(
    config: ResolvedConfig, tokenizer: Tokenizer, say: LinePrinter
) -> TextRows | None:
    """Reads the text for training the draft offline.

    Returns None if no draft is trained offline, or if it is trained on responses.

    Raises:
      ConfigError: some text cannot be used.
    """
    trains_offline = config.offline.steps > 0 and config.rollout.draft.is_learned
    return read_training_text(config, tokenizer, say) if trains_offline else None


def start_run(
    job: Job,
    batches: BatchSource,
    offline_text: TextRows | None,
    interrupt: Interrupt,
) -> RunState:
    """Builds the state of a new run.

    Policy and draft come from folders or from the cache, or are trained now, or are random. If
    rounds choose their draft length, the costs of the lengths are measured or predicted.
    `offline_text` is that of `read_offline_text`.
    """
    config, tokenizer, say = job.config, job.tokenizer, job.say
    # Weights are trained and placed on the learner's devices.
    step = build_learner_step(job)
    layout, shapes = step.state_shardings(), abstract_arguments(step, config.batch.prompts)[0]
    trains_offline = config.offline.steps > 0 and isinstance(shapes.learner.draft, NetworkState)
    draft_file, network = None, None
    # Training the draft loads the policy too, so it comes before the run's weights take memory.
    if trains_offline:
        draft_file = get_or_train_draft(config, step, tokenizer, offline_text, interrupt, say)
    else:
        network = load_draft(config, shapes.learner.draft.network, say)
    policy = load_policy(config, step, tokenizer, interrupt, say)
    if draft_file is not None:
        network = load_tree(draft_file, shapes.learner.draft.network)
    elif network is not None:
        report_agreement(config, step.generator, tokenizer, policy, network, say)
    else:
        # XLA removes the other parts of the state, since only the draft is returned.
        shardings = layout.learner.draft.network
        network = jax.jit(
            lambda: step.init_random_state().learner.draft.network, out_shardings=shardings
        )()
        if remark := describe_random_draft(config):
            say(remark)
    # Weights are donated, so that they are not in memory twice.
    state = jax.jit(step.init_state, out_shardings=layout, donate_argnums=(0, 1))(policy, network)
    machine = describe_machine(job.step.generator.mesh)
    return RunState(
        state=_set_length_costs(job.step, state, lambda: batches.prompts.place_training(0), say),
        history=batches.prompts.history,
        generation=GenerationProgress(),
        machine=machine,
        # Accelerators time rounds in the first rollout.
        timed_on={} if times_real_rounds(job.step.generator) else machine,
    )


def adapt_run(
    step: Step,
    run: RunState,
    source: PromptSource,
    restart_timing: Callable[[], None],
    say: LinePrinter,
) -> None:
    """Adapts a restored run to this machine.

    Costs of draft lengths that come from another machine or mesh are replaced. Acceptance stays.
    """
    run.machine = describe_machine(step.generator.mesh)
    saved_chooser = run.state.generator.chooser
    # Process 0 decides for all, since machines may differ between processes.
    if isinstance(saved_chooser, NoChooser) or not broadcast_flag(run.timed_on != run.machine):
        return
    say("the costs of rounds in the checkpoint are of another machine or mesh")
    state = _set_length_costs(step, run.state, lambda: source.place_training(run.generated), say)
    assert isinstance(state.generator.chooser, LengthChooser), "lengths are chosen by costs"
    chooser = state.generator.chooser.replace(acceptance=saved_chooser.acceptance)
    run.state = state.replace(generator=state.generator.replace(chooser=chooser))
    restart_timing()
    run.timed_on = {} if times_real_rounds(step.generator) else run.machine


def require_complete_batches(config: ResolvedConfig, run: RunState) -> None:
    """Checks that the schedule can go on from a restored run.

    Raises:
      ConfigError: the schedule is pipelined, and the checkpoint of another one has a batch that is
        not complete, or whose evaluation was stopped.
    """
    if config.schedule.kind != "pipelined":
        return
    remedy = "schedule.kind pipelined cannot finish; resume it with schedule.kind fused"
    groups = run.generation.filling.groups if run.generation.filling else 0
    require(
        not groups,
        f"the checkpoint has {groups} groups of a batch that dynamic sampling was filling, which"
        f" {remedy}",
    )
    # With a lag, the checkpoint is of a pipelined run, which evaluates a batch before it is queued.
    for item in run.queue if config.schedule.lag == 0 else ():
        require(
            not is_evaluation_due(config, item.record),
            f"the checkpoint was saved before the evaluation at batch {item.record.batch} was done,"
            f" which {remedy}",
        )


def adapt_filling(config: ResolvedConfig, run: RunState, batches: BatchSource) -> None:
    """Gives a run the batch that rollouts fill, where its schedule has one between two calls."""
    if config.schedule.kind == "pipelined":
        run.generation.filling = None
    elif run.generation.filling is None:
        run.generation.filling = batches.make_progress().filling


def describe_random_draft(config: ResolvedConfig) -> str:
    """Warns of a draft that starts from random weights. Returns "" for any other draft."""
    draft = config.rollout.draft
    if not draft.is_learned or draft.path or config.offline.steps:
        return ""
    outcome = (
        "learns during the run alone"
        if config.draft_training.online
        else "never learns, so that next to nothing is accepted"
    )
    remedy = "--offline.steps 300 trains it first, --rollout.draft.path loads one"
    return (
        f"the {draft.kind} draft started from random weights (offline.steps 0, no"
        f" rollout.draft.path) and {outcome}; {remedy}"
    )


def _set_length_costs(
    step: Step, state: TrainState, place_prompts: Callable[[], Prompts], say: LinePrinter
) -> TrainState:
    """Sets and prints the costs of draft lengths and the draft's acceptance.

    A CPU measures both. On an accelerator costs are predicted, and acceptance is unknown. Returns
    the state unchanged if rounds do not choose their length.
    """
    if isinstance(state.generator.chooser, NoChooser):
        return state
    is_later = times_real_rounds(step.generator)
    if not is_later:
        say(
            "measuring what rounds of each draft length cost on this machine, and what the draft is"
            " worth"
        )
    start_time = time.perf_counter()
    state, lengths = (
        fill_length_chooser(step, state, place_prompts()),
        step.generator.settings.lengths,
    )
    chooser = state.generator.chooser
    assert isinstance(chooser, LengthChooser), "lengths are chosen by costs"
    costs = np.asarray(chooser.round_cost)[:, 0, 0]
    tokens = np.asarray(length_chooser.expected_tokens(chooser.acceptance, lengths))
    table = "; ".join(
        f"K={length} costs {cost:.2f} plain steps and keeps {expected:.2f} tokens in the mean row"
        for length, cost, expected in zip(lengths, costs / costs[0], tokens, strict=True)
    )
    origin = f"measured in {time.perf_counter() - start_time:.1f} s"
    if is_later:
        origin = "by public figures or an earlier run, until the first rollout has timed its rounds"
    say(f"{origin}: {table}")
    return state


def empty_history(config: ResolvedConfig) -> AnswerHistory:
    """Returns a history without answers, for this process."""
    return AnswerHistory(config.rollout.past_answers, jax.process_index())
