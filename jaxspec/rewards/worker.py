"""What a worker of the pool does with a task; it is forked by `keeper.py`, and JAX is not there.

A task is a list that starts with its kind, an answer a value of JSON.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxspec.inputs import own_code
from jaxspec.rewards.code import adopt_orphans, is_test, passes
from jaxspec.rewards.mathematics.equality import is_readable, math_equal

MEMORY = 3 * 2**30
"""Bytes of address space of a worker that runs checks of jaxspec alone."""
OUTCOMES = "correct", "wrong", "no_answer"
"""What a user's function may call a response."""


def work(tasks: Connection, function: str, seconds: float, folder: str) -> None:
    """Answers tasks until their end; programs run in `folder`, which is made.

    The first message says that the worker is ready, or why it cannot be; importing is done by then,
    and is not on any task's clock.
    """
    os.setsid()  # whoever ends this process ends what it has started, too
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # what a function prints would go where the run tells its progress
        os.dup2(nowhere, number)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    own = os.getpid()
    try:
        call = own_code.imported(function) if function else None
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, and is named
        _send(tasks, {"failed": own_code.told(error)})
        return
    if not function:
        with contextlib.suppress(ValueError, OSError):  # not every system limits it
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _send(tasks, {"ready": True})
    while True:
        try:
            kind, *arguments = json.loads(tasks.recv_bytes())
        except EOFError:
            return
        # The keeper ends a worker that is late. Should there be no keeper any more, this does.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 5)
        match kind:
            case "math":
                answer = math_equal(*arguments)
            case "code":
                answer = program_passes(*arguments, seconds=seconds, folder=folder)
            case "readable":
                verifier, reference = arguments
                answer = is_readable(reference) if verifier == "math" else is_test(reference)
            case _:
                assert call is not None, "rows are given to a function only where there is one"
                answer = rewards_of(call, *arguments)
        if os.getpid() != own:  # a function has forked, and its child returns as well
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(tasks, answer)


def _send(tasks: Connection, answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
        tasks.send_bytes(json.dumps(answer).encode())


def program_passes(
    tests: str, program: str, *, seconds: float, folder: str
) -> bool | dict[str, str]:
    """Whether a program passes tests, or why that cannot be found here."""
    try:
        return passes(tests, program, seconds, folder)
    except OSError as error:
        return {"error": own_code.told(error)}


# ---- a user's function


def rewards_of(call: Callable[..., Any], *rows: list[Any]) -> dict[str, Any]:
    """What a function gives for some rows: a reward with an outcome for each, or why there is
    none."""
    try:
        found = call(*rows)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        found = list(found)
    except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is told
        return {"error": own_code.told(error)}
    if len(found) != len(rows[0]):
        return {"error": f"it gave {len(found)} rewards for {len(rows[0])} rows"}
    rewards = []
    for each in found:
        try:
            rewards.append(_one(each))
        except Exception as error:  # noqa: BLE001 - the same
            rewards.append([None, own_code.told(error)])
    return {"rewards": rewards}


async def _awaited(found: Any) -> Any:
    return await found


def _one(given: Any) -> list[Any]:
    """A reward and its outcome, or None and what is wrong with it."""
    reward, outcome = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    try:
        number = float(reward)  # pyright: ignore[reportArgumentType] - it may be anything
    except (TypeError, ValueError):
        return [None, f"it gave {reprs(given)}, which is no number"]
    if not math.isfinite(number):
        return [None, f"it gave {number}, which is not finite"]
    if outcome is None:
        outcome = "correct" if number > 0 else "wrong"
    if outcome not in OUTCOMES:
        return [None, f"it gave the outcome {reprs(outcome)}, which is none of {list(OUTCOMES)}"]
    return [number, outcome]


def reprs(value: Any) -> str:
    """A value in a message."""
    return repr(value)[: own_code.SHOWN]
