"""A user's reward function: the form that it has, its calls, and the rewards that it returns."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.inputs import own_code

OUTCOMES = "correct", "wrong", "no_answer"
"""What a user's function may call a response."""
OWN = "function(prompts, responses, answers, rows)"
VERL = "compute_score(data_source, solution_str, ground_truth, extra_info)"
VERL_BATCH = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
TRL = "function(prompts, completions, **columns)"
REFERENCES = "ground_truth", "solution", "answer", "answers"
"""Names by which functions of TRL's form ask for the references, where no column has them."""


class OwnFunction(NamedTuple):
    """A user's function."""

    call: Callable[..., Any]
    """Takes prompts, responses, answers and rows, as lists."""
    form: str = ""
    """The form of another project that it was written for, in words."""


def adapt_function(function: Callable[..., Any]) -> OwnFunction:
    """Finds out how a function is to be called, by the names of its parameters.

    Raises:
      TypeError: it takes neither four lists nor the arguments of verl's or TRL's functions.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return OwnFunction(function)
    names = signature.parameters
    if "solution_str" in names:
        _require_given(signature, "verl", _verl_row("", "", "", {}))
        return OwnFunction(_row_by_row(function, signature), f"verl's form, row by row: {VERL}")
    if "solution_strs" in names:
        _require_given(signature, "verl", _verl_rows([], [], [], []))
        return OwnFunction(_all_rows(function, signature), f"verl's form: {VERL_BATCH}")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in names.values())
    try:
        signature.bind([], [], [], [])
    except TypeError as error:
        if "completions" not in names:
            raise TypeError(
                f"{_name(function)}{signature} cannot be called with four lists ({error}); write it"
                f" as {OWN}, as {VERL} (verl), or as {TRL} (TRL)"
            ) from error
    else:
        if "completions" not in names or (not takes_any and "rows" in names):
            return OwnFunction(function)
    return OwnFunction(_by_column(function, signature), f"TRL's form: {TRL}")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _require_given(signature: inspect.Signature, whose: str, given: Mapping[str, Any]) -> None:
    by_place = [
        name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_ONLY
    ]
    if by_place:
        raise TypeError(
            f"it has {whose}'s form, which gives values by name, and takes {', '.join(by_place)} by"
            " place alone; take the `/` out of its parameters"
        )
    missing = [name for name in _required(signature) if name not in given]
    if missing:
        raise TypeError(
            f"it has {whose}'s form, and needs {', '.join(missing)}, which that form does not give:"
            f" {', '.join(given)}; give {' and '.join(missing)} a default"
        )


def _required(signature: inspect.Signature) -> list[str]:
    """Names of parameters without a default."""
    varying = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        name
        for name, each in signature.parameters.items()
        if each.default is each.empty and each.kind not in varying
    ]


def _accepted(signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes."""
    parameters = signature.parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _verl_row(prompt: str, response: str, answer: str, row: dict[str, Any]) -> dict[str, Any]:
    del prompt
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": response,
        "ground_truth": answer,
        "extra_info": row.get("extra_info") or {},
    }


def _verl_rows(*columns: list[Any]) -> dict[str, list[Any]]:
    rows = [_verl_row(*row) for row in zip(*columns, strict=True)]
    return {f"{name}s": [row[name] for row in rows] for name in _verl_row("", "", "", {})}


def _row_by_row(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def call(*columns: list[Any]) -> list[Any]:
        given = (_verl_row(*row) for row in zip(*columns, strict=True))
        return [function(**_accepted(signature, each)) for each in given]

    return call


def _all_rows(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def call(*columns: list[Any]) -> Any:
        return function(**_accepted(signature, _verl_rows(*columns)))

    return call


def _by_column(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def call(
        prompts: list[str], responses: list[str], answers: list[str], rows: list[dict[str, Any]]
    ) -> Any:
        chats = [row.get("prompt") for row in rows]
        as_chat = all(_is_chat(each) for each in chats)  # TRL gives completions as prompts are
        given: dict[str, Any] = dict.fromkeys(REFERENCES, answers)
        names = {name for row in rows for name in row}
        given |= {name: [row.get(name) for row in rows] for name in sorted(names)}
        given["prompts"] = chats if as_chat else prompts
        given["completions"] = (
            [[{"role": "assistant", "content": each}] for each in responses]
            if as_chat
            else responses
        )
        given.pop("prompt", None)
        _require_given(signature, "TRL", given)
        return function(**_accepted(signature, given))

    return call


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and "role" in turn for turn in prompt)
    )


# ---- calls, and what comes of them


def rewards_of(call: Callable[..., Any], *rows: list[Any]) -> dict[str, Any]:
    """What a function gives for some rows: a reward with an outcome for each, or why there is
    none."""
    try:
        found = call(*rows)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        found = _listed(found, len(rows[0]))
        if any(map(inspect.isawaitable, found)):
            found = asyncio.run(_all_awaited(found))
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


async def _all_awaited(found: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*(_awaited(each) for each in found))


def _listed(found: Any, rows: int) -> list[Any]:
    """What a function returned, as a list. A text or a dictionary can be gone through, too, but
    gives characters or keys."""
    if isinstance(found, str | bytes | Mapping | set | frozenset) or not _is_iterable(found):
        kind = "dictionary" if isinstance(found, Mapping) else type(found).__name__
        raise TypeError(
            f"it returned a {kind} for {rows} rows; return a list with a number for each row"
        )
    return list(found)


def _is_iterable(found: Any) -> bool:
    try:
        iter(found)
    except TypeError:
        return False
    return True


def _one(given: Any) -> list[Any]:
    """A reward and its outcome, or None and what is wrong with it."""
    reward, outcome = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if isinstance(reward, Mapping):
        return [None, f"it gave a dictionary, {shown(given)}, in place of a number"]
    if isinstance(reward, str | bytes):  # which may be read as one
        return [None, f"it gave {shown(given)}, which is no number but text"]
    if reward is None:
        return [None, "it gave None; give 0 where the function does not apply to a row"]
    try:
        number = float(reward)  # pyright: ignore[reportArgumentType] - it may be anything
    except (TypeError, ValueError):
        return [None, f"it gave {shown(given)}, which is no number"]
    if not math.isfinite(number):
        return [None, f"it gave {number}, which is not finite"]
    if outcome is None:
        outcome = "correct" if number > 0 else "wrong"
    if outcome not in OUTCOMES:
        return [None, f"it gave the outcome {shown(outcome)}, which is none of {list(OUTCOMES)}"]
    return [number, outcome]


def shown(value: Any) -> str:
    """A value in a message."""
    return repr(value)[: own_code.SHOWN]
