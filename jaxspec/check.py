"""Whether a run will run, before anyone rents the machine: `python -m jaxspec.check --config
rl_think.py:qwen3_8b --devices 32`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import begin

    begin()

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from rich import box
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.build import automatic
from jaxspec.compiled import findings, hardware
from jaxspec.compiled.compiler import Listener, for_devices, listening, set_quick
from jaxspec.compiled.hardware import HERE, Card
from jaxspec.compiled.tables import cost_json, exchanges_table, work_table
from jaxspec.config.check import check
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import check_folders
from jaxspec.config.here import with_what_is_here
from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.data.problems import load_sets
from jaxspec.data.scoring import scorer_of, try_scorers
from jaxspec.host import memory
from jaxspec.host.job import Job, at_once, make_job, start_jax
from jaxspec.host.runner import Runner, abstract, times_real_rounds, whole_step
from jaxspec.inputs.checked import require
from jaxspec.models.attention import BLOCK
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import Adapted
from jaxspec.step import Step
from jaxspec.system.progress import Screen, Waiting

COMMAND = "python -m jaxspec.check"
ABOUT = f"""Says whether a run will run on so many devices, without having them: reads the config,
the files that it names and are here, the tokenizer and the rewards' answers, then compiles the real
step for the real mesh, and tells what it takes of a device's memory, what it computes, what goes
between devices, and what should not be there.

--devices N        of the whole job; left out with --hardware {HERE}: those that there are
--hardware NAME    {", ".join(hardware.HARDWARE)}, or {HERE}: the devices that JAX finds; left out:
                   h200 for up to 8 devices, gb200 for more
--json             one JSON object in place of the tables

Folders and files that are not here stop nothing: what was not looked at is said. Compiling for
GPUs without one needs the extra `check`; without it the step is compiled for virtual devices of the
CPU. The exit status is 0 where it should run, 1 where it will not, 2 for bad input. Examples:
  {COMMAND} --config rl_think.py:qwen3_8b --devices 32
  {COMMAND} --config rl_think.py:qwen3_0.6b --devices 1 --hardware rtx4090 --json"""
_GIB = 2**30
_MOST_VIRTUAL = 512
"""Devices that a CPU can be split into."""


class Target(NamedTuple):
    """What a step is compiled for."""

    name: str
    card: Card | None
    """None: the devices that are here."""
    devices: list[Any]
    virtual: bool
    """Whether the CPU's virtual devices stand for the card's."""

    @property
    def limit(self) -> int:
        """Bytes that a device has."""
        return self.card.usable if self.card else memory.device_memory()

    @property
    def told(self) -> str:
        """In words."""
        kind = self.card.kind if self.card else self.devices[0].device_kind
        stand_in = ", compiled for virtual devices of this CPU" if self.virtual else ""
        return f"{kind}{stand_in}"


class Checked(NamedTuple):
    """What there is to tell."""

    job: Job
    target: Target
    unseen: list[str]
    fit: memory.Fitted
    reason: str
    """Why it will not run; empty where it should."""
    found: findings.Findings
    warnings: list[str]
    seconds: list[float]
    """Of each program that was compiled, the last of which is told of."""


def main(argv: Sequence[str]) -> int:
    """Checks; returns the exit status."""
    options, words = parsed(argv)
    config, name = load_config(words, "check", ABOUT)
    require(options.devices >= 0, f"--devices {options.devices}: give the number of the whole job")
    with uncached():
        made = checked(config, options)
    if options.json:
        print(json.dumps(as_json(name, made)))
    else:
        show(name, made, Screen())
    return 1 if made.reason else 0


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that are no settings, and the words that are left."""
    parser = argparse.ArgumentParser(prog=COMMAND, add_help=False, allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--json", action="store_true")
    return parser.parse_known_args(argv)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs are compiled anew: one that is kept says nothing while it is made, and those for
    devices that are not there are not kept."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    reset_cache()  # JAX asks once in a process whether programs are kept
    try:
        yield
    finally:
        jax.config.update(name, before)
        reset_cache()


def checked(config: Config, options: argparse.Namespace) -> Checked:
    """All of it, in the order in which it is cheap."""
    with listening() as listener, Waiting(listener.say) as waiting:
        waiting.begin("reading the config, and the folders that it names")
        whole, unseen = with_what_is_here(config)
        target = target_of(whole, options.hardware, options.devices)
        count = len(target.devices)
        # Those of several machines are of several processes, which leave none idle.
        processes = 1 if target.card is None or count <= target.card.node else count
        mesh = meshes.make_mesh(*check(whole, count, processes), target.devices)
        used = target._replace(devices=[*mesh.devices.flat])
        job = make_job(whole, mesh)
        check_folders(whole, jax.eval_shape(job.step.fresh_policy), job.tokenizer.size)
        files = {item for item in unseen if item.startswith("data.")}
        scorers = scorer_of(whole)
        if not files and not config.mixture:
            waiting.begin("reading the problems")
            try_scorers(whole, load_sets(whole, job.tokenizer), scorers)
        if times_real_rounds(job.step.generator):
            phases = "the phases, which draft_length auto has compiled one by one, by themselves"
            unseen.append(phases)
        with for_devices(mesh):
            if len(used.devices) < len(target.devices):
                more = "more data shards would not divide every batch (batch.prompts, rows)"
                listener.say(f"using {len(used.devices)} of {len(target.devices)} devices: {more}")
            return compiled(job, used, unseen, listener, waiting)


# ---- compiling


def target_of(config: ResolvedConfig, name: str, count: int) -> Target:
    """The devices to compile for.

    Raises:
      ConfigError: hardware that is not known, or more devices than there can be.
    """
    require(
        bool(count) or name == HERE,
        f"no --devices: give their number, or --hardware {HERE} for those that there are",
    )
    if name == HERE:
        start_jax(config, count)
        there = meshes.count_devices()
        require(count <= there, f"--devices {count}: JAX finds {there} here")
        return Target(HERE, None, jax.devices()[: count or there], virtual=False)
    name = name or hardware.usual(count)
    card = hardware.card_of(name)
    jax.config.update("jax_platforms", "cpu")
    if hardware.plugin():
        set_quick()
    start_jax(config, count)
    if hardware.plugin():
        return Target(name, card, list(hardware.devices_of(card, count)), virtual=False)
    there = meshes.count_devices()
    remedy = "install the extra `check`, which compiles for GPUs without one"
    require(
        count <= there,
        f"--devices {count}: this CPU stands for {there} (at most {_MOST_VIRTUAL}, fewer where"
        f" JAX_NUM_CPU_DEVICES or XLA_FLAGS says so); {remedy}",
    )
    require(
        not config.rollout.engine.command_buffers,
        f"rollout.engine.command_buffers: this CPU, which stands for GPUs here, has none; {remedy}",
    )
    return Target(name, card, jax.devices()[:count], virtual=True)


def compiled(
    job: Job, target: Target, unseen: list[str], listener: Listener, waiting: Waiting
) -> Checked:
    """Compiles the step as a run does, and reads it."""
    config, prompts = job.config, job.config.batch.prompts
    seconds: list[float] = []

    def runner_of(step: Step) -> Runner:
        listener.say(f"compiling the step for {job.mesh.size} x {target.told}; this takes minutes")
        waiting.begin("tracing the step")
        began = time.perf_counter()
        runner = whole_step(step, prompts, waiting.say)
        seconds.append(time.perf_counter() - began)
        waiting.begin("reading the compiled program")
        listener.say(f"compiled in {seconds[-1]:.0f} s")
        return runner

    reason = ""
    # what a CPU's program says of its temporaries is not true of a GPU's
    limit = sys.maxsize if target.virtual else target.limit
    try:
        fit = memory.fitted(job.step, prompts, runner_of, automatic(config, job.mesh), limit)
    except memory.DoesNotFit as error:
        fit, reason = error.smallest, str(error)
    fit = fit._replace(limit=target.limit)
    if target.virtual and not reason:
        reason = _kept_reason(fit)
    wanted = expected(fit, config)
    if target.virtual:  # a CPU's program lays keys out anew where a GPU's does not
        wanted = wanted._replace(layer_cache=0, paged=False)
    found = findings.read(fit.runner.programs["step"].as_text(), wanted, target.card)
    warnings = [*listener.resharded, *found.warnings]
    return Checked(job, target, unseen, fit, reason, found, warnings, seconds)


def _kept_reason(fit: memory.Fitted) -> str:
    kept = sum(part.size for part in fit.parts if part.name != memory.BESIDE)
    too_much = f"{_gib(kept)} are kept on each device, which has {_gib(fit.limit)}"
    return too_much if kept > fit.limit else ""


def expected(fit: memory.Fitted, config: ResolvedConfig) -> findings.Expected:
    """What its program is looked through for."""
    step, prompts = fit.step, config.batch.prompts
    mesh = dict(step.mesh.shape)
    state, _, _ = abstract(step, prompts)
    networks = [state.learner.policy.network]
    if state.learner.draft is not None:
        networks.append(state.learner.draft.network)
    size = jax.numpy.dtype(config.model.dtype).itemsize
    synced = 0
    for leaf in jax.tree.leaves(networks):
        entries = [meshes.named(entry) for entry in leaf.sharding.spec]
        stays = [entry for entry in entries if meshes.DATA not in entry]
        if len(stays) < len(entries):
            others = math.prod(mesh[axis] for entry in stays for axis in entry)
            synced += leaf.size * size // others
    peers = mesh[meshes.TENSOR]
    pool = sum(part.size for part in fit.parts if part.name == memory.POOL)
    layers = config.model.layers + max(1, config.rollout.draft.layers)
    return findings.Expected(
        mesh=mesh,
        by_rows=meshes.ROWS,
        vocab=config.model.vocab,
        rows=prompts * config.batch.group_size,
        row_length=config.row_length,
        layer_cache=pool // (2 * layers),
        synced=synced,
        paged=step.sizes.page_size > 0,
        micro_batch=2 * active_weights(step, config) * step.learner.tokens / peers,
        experts=config.model.family.experts > 0,
        draft_learns=step.online,
        command_buffers=step.generator.command_buffers,
        blocks=config.row_length / BLOCK,
    )


def active_weights(step: Step, config: ResolvedConfig) -> int:
    """Weights of the policy that a token is multiplied with: not the embedding, and of experts
    those that it is sent to."""
    network = jax.eval_shape(step.fresh_policy)
    policy: Decoder = network.base if isinstance(network, Adapted) else network
    family, total = config.model.family, config.model.vocab * config.model.embed
    for path, leaf in jax.tree_util.tree_leaves_with_path(policy.layers):
        if leaf.ndim > 2:  # the others are norms and biases
            total += leaf.size
            if ".expert_" in jax.tree_util.keystr(path):
                total -= leaf.size * (family.experts - family.experts_per_token) // family.experts
    return total


# ---- telling


def verdict(made: Checked) -> str:
    """In a line."""
    taken = sum(part.size for part in made.fit.parts)
    room = f"{_gib(taken)} of {_gib(made.fit.limit)} a device"
    if made.reason:
        return f"it will not run: {made.reason}"
    caveat = (
        "; its temporaries are those of a program for CPUs, which are not a GPU's"
        if made.target.virtual
        else ""
    )
    warned = f", with {len(made.warnings)} warnings" if made.warnings else ""
    return f"it should run: {room}{caveat}{warned}"


def micro_batches(made: Checked) -> int:
    """That a data shard learns from in a step, if all rows are of the longest kind."""
    step, config = made.fit.step, made.job.config
    rows = config.batch.prompts * config.batch.group_size // meshes.row_shards(step.mesh)
    return -(-rows * (config.row_length - 1) // step.learner.tokens)


def as_json(name: str, made: Checked) -> dict[str, Any]:
    """All of it as plain values; sizes are bytes on each device."""
    step, card = made.fit.step, made.target.card
    return {
        "config": name,
        "hardware": made.target.name,
        "device": made.target.told,
        "card": card._asdict() if card else None,
        "devices": step.mesh.size,
        "mesh": dict(step.mesh.shape),
        "jax": jax.__version__,
        "virtual": made.target.virtual,
        "not_looked_at": made.unseen,
        "compile_seconds": made.seconds,
        "sizes": step.sizes._asdict() | {"slots": step.generator.settings.slots},
        "memory": {
            "limit": made.fit.limit,
            "taken": sum(part.size for part in made.fit.parts),
            "owners": {part.name: part.size for part in made.fit.parts},
            "remedies": {part.name: part.remedy for part in made.fit.parts},
        },
        "micro_batches": micro_batches(made),
        "work": {row: cost_json(cost) for row, cost in made.found.rows.items()},
        "sync_moves_each_weight": made.found.sync_moves,
        "warnings": made.warnings,
        "runs": not made.reason,
        "verdict": verdict(made),
    }


def show(name: str, made: Checked, screen: Screen) -> None:
    """The tables, and the verdict last."""
    step, rows = made.fit.step, made.found.rows
    sizes, mesh = step.sizes, dict(step.mesh.shape)
    screen.print(
        f"{name} on {made.fit.step.mesh.size} x {made.target.told}, {mesh}, jax {jax.__version__}"
    )
    for item in made.unseen:
        screen.print(f"not looked at: {item}")
    screen.print(_memory_table(made), work_table(rows, made.target.card), exchanges_table(rows))
    slots = step.generator.settings.slots
    pages = f"{sizes.pages} pages of {sizes.page_size}" if sizes.page_size else "a page a row"
    screen.print(
        f"{micro_batches(made)} micro-batches of {sizes.tokens} tokens a data shard if all rows are"
        f" of the longest kind; {slots} slots, {pages}; sync sends"
        f" {made.found.sync_moves:.2f} times the bytes of the split weights"
    )
    for warning in made.warnings:
        screen.print(f"warning: {warning}", markup=False)
    screen.print(verdict(made), markup=False)


def _memory_table(made: Checked) -> Table:
    table = Table("of each device", "GiB", "less with", box=box.SIMPLE)
    for part in sorted(made.fit.parts, key=lambda part: -part.size):
        table.add_row(part.name, f"{part.size / _GIB:.2f}", part.remedy)
    total = sum(part.size for part in made.fit.parts)
    table.add_row("in all", f"{total / _GIB:.2f}", f"of {made.fit.limit / _GIB:.2f}")
    return table


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def run(argv: Sequence[str]) -> int:
    """The exit status of a check; a signal ends it at once."""
    return at_once("checking", lambda _: main(argv))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
