"""The process in which a model's program runs, as a script (`code.py` starts it): it says what the
program defines, and calls what it is asked to call.

Only plain values come out of it, so that no object of the program's is ever compared with anything.
It imports nothing of jaxspec.
"""

import builtins
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

ITERATORS = (
    *(map, filter, zip, range, enumerate, reversed, types.GeneratorType),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
"""What is given as the list of what it yields."""
MOST = 100_000
"""Values that are taken from an iterator."""


def encoded(value: Any, kept: list[Any]) -> list[Any]:
    """A value as JSON: plain ones by type, others by their number among the objects `kept`."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return [kind.__name__, value]
    if kind in (int, float, complex):
        return [kind.__name__, repr(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, list(value)]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encoded(each, kept) for each in value]]
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        return ["dict", [[encoded(k, kept), encoded(v, kept)] for k, v in dict.items(value)]]
    if kind.__name__ == "deque" and kind.__module__ == "collections":
        return ["list", [encoded(each, kept) for each in value]]
    if kind in ITERATORS or (hasattr(kind, "__next__") and kind.__module__ == "itertools"):
        found = [each for each, _ in zip(value, range(MOST), strict=False)]
        return ["iterator", [encoded(each, kept) for each in found]]
    name = getattr(value, "__name__", "")
    if kind is type and getattr(builtins, name, None) is value:
        return ["type", name]
    kept.append(value)
    return ["object", len(kept) - 1]


def decoded(value: list[Any], thing: Callable[[int], Any]) -> Any:
    """A value out of JSON; `thing` makes what stands for an object that is not here, of its
    number."""
    kind, content = value
    if kind in ("NoneType", "bool", "str"):
        return content
    if kind in ("int", "float", "complex"):
        return {"int": int, "float": float, "complex": complex}[kind](content)
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](list(content))
    if kind == "dict":
        return {decoded(k, thing): decoded(v, thing) for k, v in content}
    if kind == "type" and isinstance(getattr(builtins, content), type):
        return getattr(builtins, content)
    if kind == "object":
        return thing(content)
    found = [decoded(each, thing) for each in content]
    return iter(found) if kind == "iterator" else KINDS[kind](found)


KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    """Arguments: the descriptors to read from and to write to, seconds of processor time."""
    reads, writes, seconds = map(int, sys.argv[1:])
    questions = os.fdopen(reads, encoding="utf-8")
    answers = os.fdopen(writes, "w", encoding="utf-8")
    for limit, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, 2**30),
        (resource.RLIMIT_FSIZE, 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    sys.setrecursionlimit(5000)
    answers.write("ready\n")
    answers.flush()
    names: dict[str, Any] = {"__name__": "__main__"}
    kept: list[Any] = []
    for line in questions:
        asked = json.loads(line)
        try:
            if "program" in asked:
                exec(compile(asked["program"], "program", "exec"), names)
                modules = [name for name, value in names.items() if type(value) is type(sys)]
                found = [name for name, value in names.items() if callable(value)]
                answer = {"names": found, "modules": modules}
            else:
                given = [decoded(each, kept.__getitem__) for each in asked["arguments"]]
                named = {
                    name: decoded(each, kept.__getitem__) for name, each in asked["named"].items()
                }
                to = asked["to"]
                own = names[to] if type(to) is str else kept[to]
                match asked["do"]:
                    case "get":
                        value = getattr(own, *given)
                    case "set":
                        value = setattr(own, *given)
                    case _:
                        value = own(*given, **named)
                answer = {"value": encoded(value, kept)}
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is told
            answer = {"raised": type(error).__name__, "why": str(error)[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
