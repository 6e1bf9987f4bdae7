"""Calls a user's reward function, and checks its rewards.

Functions written for verl or TRL are recognized by the names of their parameters.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.inputs import own_code

OUTCOME_NAMES = "correct", "wrong", "no_answer"
"""Outcomes that a user's function may return."""
LIST_FORM = "function(prompts, responses, answers, rows)"
VERL_FORM = "compute_score(data_source, solution_str, ground_truth, extra_info)"
VERL_BATCH_FORM = "compute_score(data_sources, solution_strs, ground_truths, extra_infos)"
TRL_FORM = "function(prompts, completions, **columns)"
REFERENCE_NAMES = "ground_truth", "solution", "answer", "answers"
"""Parameters of TRL functions that receive the reference answers, unless a column has the name."""


class UserFunction(NamedTuple):
    """User's function, adapted to one calling form."""

    call: Callable[..., Any]
    """Function of the lists prompts, responses, answers and rows."""
    form: str = ""
    """Description of the other project's form that the function has, or empty."""


def adapt_function(function: Callable[..., Any]) -> UserFunction:
    """Adapts a function to four lists as arguments.

    The names of its parameters tell the form that it has.

    Raises:
      TypeError: the function cannot be called with four lists, nor as verl or TRL do.
    """
    try:
        signature = inspect.signature(function)
    # Some functions written in C have no signature.
    except (TypeError, ValueError):
        return UserFunction(function)
    parameters = signature.parameters
    if "solution_str" in parameters:
        _check_required_parameters(signature, "verl", _build_verl_arguments("", "", "", {}))
        return UserFunction(
            _wrap_verl_row(function, signature), f"verl's form, row by row: {VERL_FORM}"
        )
    if "solution_strs" in parameters:
        _check_required_parameters(signature, "verl", _build_verl_batch([], [], [], []))
        return UserFunction(
            _wrap_verl_batch(function, signature), f"verl's form: {VERL_BATCH_FORM}"
        )
    # A parameter `completions` means TRL's form, unless the function clearly takes the four lists:
    # it also has a parameter `rows`, and no `**columns`.
    accepts_any_keyword = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    try:
        signature.bind([], [], [], [])
    except TypeError as error:
        if "completions" not in parameters:
            raise TypeError(
                f"{_function_name(function)}{signature} cannot be called with four lists ({error});"
                f" write it as {LIST_FORM}, as {VERL_FORM} (verl), or as {TRL_FORM} (TRL)"
            ) from error
    else:
        if "completions" not in parameters or (not accepts_any_keyword and "rows" in parameters):
            return UserFunction(function)
    return UserFunction(_wrap_trl(function, signature), f"TRL's form: {TRL_FORM}")


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_required_parameters(
    signature: inspect.Signature, project: str, provided: Mapping[str, Any]
) -> None:
    """Checks that a form provides all required parameters.

    Raises:
      TypeError: a parameter is missing, or cannot be passed by name.
    """
    positional_names = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_ONLY
    ]
    if positional_names:
        raise TypeError(
            f"it has {project}'s form, which passes arguments by name, but takes"
            f" {', '.join(positional_names)} by position only; remove the `/` from its parameters"
        )
    missing_names = [name for name in _find_required_parameters(signature) if name not in provided]
    if missing_names:
        raise TypeError(
            f"it has {project}'s form and requires {', '.join(missing_names)}, which is not among"
            f" {', '.join(provided)}; give {' and '.join(missing_names)} a default"
        )


def _find_required_parameters(signature: inspect.Signature) -> list[str]:
    """Returns the names of parameters without a default."""
    variadic_kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic_kinds
    ]


def _select_accepted_arguments(
    signature: inspect.Signature, arguments: dict[str, Any]
) -> dict[str, Any]:
    """Selects the arguments that a function accepts."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _build_verl_arguments(
    prompt: str, response: str, answer: str, row: dict[str, Any]
) -> dict[str, Any]:
    """Builds verl's arguments for one row."""
    # verl passes no prompt.
    del prompt
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": response,
        "ground_truth": answer,
        "extra_info": row.get("extra_info") or {},
    }


def _build_verl_batch(*columns: list[Any]) -> dict[str, list[Any]]:
    """Builds verl's arguments for all rows, with plural names."""
    rows = [_build_verl_arguments(*row) for row in zip(*columns, strict=True)]
    return {
        f"{name}s": [row[name] for row in rows] for name in _build_verl_arguments("", "", "", {})
    }


def _wrap_verl_row(
    function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    def call_rows(*columns: list[Any]) -> list[Any]:
        argument_sets = (_build_verl_arguments(*row) for row in zip(*columns, strict=True))
        return [
            function(**_select_accepted_arguments(signature, arguments))
            for arguments in argument_sets
        ]

    return call_rows


def _wrap_verl_batch(
    function: Callable[..., Any], signature: inspect.Signature
) -> Callable[..., Any]:
    def call_batch(*columns: list[Any]) -> Any:
        return function(**_select_accepted_arguments(signature, _build_verl_batch(*columns)))

    return call_batch


def _wrap_trl(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def call_columns(
        prompts: list[str], responses: list[str], answers: list[str], rows: list[dict[str, Any]]
    ) -> Any:
        # As in TRL, completions are chats if prompts are.
        chats = [row.get("prompt") for row in rows]
        is_chat = all(_is_chat(chat) for chat in chats)
        arguments: dict[str, Any] = dict.fromkeys(REFERENCE_NAMES, answers)
        names = {name for row in rows for name in row}
        arguments |= {name: [row.get(name) for row in rows] for name in sorted(names)}
        arguments["prompts"] = chats if is_chat else prompts
        arguments["completions"] = (
            [[{"role": "assistant", "content": response}] for response in responses]
            if is_chat
            else responses
        )
        # The column `prompt` is already passed as `prompts`.
        arguments.pop("prompt", None)
        # Checked at each call, as the columns depend on the rows.
        _check_required_parameters(signature, "TRL", arguments)
        return function(**_select_accepted_arguments(signature, arguments))

    return call_columns


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(turn, dict) and "role" in turn for turn in prompt)
    )


def compute_rewards(call: Callable[..., Any], *rows: list[Any]) -> dict[str, Any]:
    """Calls a function, and checks its rewards.

    `rows` are the lists of prompts, responses, answers and rows. Returns `{"rewards": [[NUMBER,
    OUTCOME], ...]}`. A row whose reward is invalid has `[None, REASON]`. If the call fails, or the
    number of rewards is wrong, returns `{"error": REASON}`.
    """
    try:
        result = call(*rows)
        if inspect.isawaitable(result):
            result = asyncio.run(_await_value(result))
        result = _to_reward_list(result, len(rows[0]))
        # An async function that is called row by row returns an awaitable for each row.
        if any(map(inspect.isawaitable, result)):
            result = asyncio.run(_await_all(result))
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return {"error": own_code.describe_error(error)}
    if len(result) != len(rows[0]):
        return {"error": f"it returned {len(result)} rewards for {len(rows[0])} rows"}
    rewards = []
    for value in result:
        try:
            rewards.append(_parse_reward(value))
        except Exception as error:  # noqa: BLE001 - `float()` of a user's object may raise anything
            rewards.append([None, own_code.describe_error(error)])
    return {"rewards": rewards}


async def _await_value(value: Any) -> Any:
    return await value


async def _await_all(values: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*(_await_value(value) for value in values))


def _to_reward_list(result: Any, row_count: int) -> list[Any]:
    """Converts a function's result to a list.

    Raises:
      TypeError: the result is text, a mapping, a set, or not iterable.
    """
    # Strings, mappings and sets are iterable, but yield characters, keys, or no order.
    if isinstance(result, str | bytes | Mapping | set | frozenset) or not _is_iterable(result):
        kind = "dictionary" if isinstance(result, Mapping) else type(result).__name__
        raise TypeError(
            f"it returned a {kind} for {row_count} rows; return a list with a number for each row"
        )
    return list(result)


def _is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def _parse_reward(value: Any) -> list[Any]:
    """Returns a reward and its outcome.

    If the value is invalid, returns None and the reason.
    """
    reward, outcome = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(reward, Mapping):
        return [None, f"it returned the dictionary {describe_value(value)}, not a number"]
    # `float()` would accept a string such as "0.5".
    if isinstance(reward, str | bytes):
        return [None, f"it returned the text {describe_value(value)}, not a number"]
    if reward is None:
        return [None, "it returned None; return 0 for rows that the function does not apply to"]
    try:
        number = float(reward)  # pyright: ignore[reportArgumentType] - it may be anything
    except (TypeError, ValueError):
        return [None, f"it returned {describe_value(value)}, which is not a number"]
    if not math.isfinite(number):
        return [None, f"it returned {number}, which is not finite"]
    if outcome is None:
        outcome = "correct" if number > 0 else "wrong"
    if outcome not in OUTCOME_NAMES:
        return [
            None,
            f"it returned the outcome {describe_value(outcome)}, which is not one of"
            f" {list(OUTCOME_NAMES)}",
        ]
    return [number, outcome]


def describe_value(value: Any) -> str:
    """Formats a value for a message, truncated."""
    return repr(value)[: own_code.MAX_ERROR_LENGTH]
