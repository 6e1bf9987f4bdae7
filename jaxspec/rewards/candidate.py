"""Runs a model's program, and answers questions about it.

`code.py` starts this file as a script, which therefore imports nothing of jaxspec. Questions and
answers are lines of JSON in two pipes. Answers hold plain values only, so no code of the program
decides a comparison in the tests.
"""

import builtins
import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

ITERATOR_TYPES = (
    *(map, filter, zip, range, enumerate, reversed, types.GeneratorType),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
"""Types of values that are sent as a list of their items."""
MAX_ITEMS = 100_000
"""Items read at most from an iterator, which may be endless."""


def encode_value(value: Any, objects: list[Any]) -> list[Any]:
    """Encodes a value as JSON.

    Plain values, containers and iterators are encoded by content, and built-in types by name. Any
    other value is appended to `objects` and encoded by its index there.
    """
    # Exact types, not `isinstance`: a subclass may override `==` and arithmetic.
    value_type = type(value)
    if value is None or value_type in (bool, str):
        return [value_type.__name__, value]
    # `repr` is exact for floats, and JSON has no complex numbers.
    if value_type in (int, float, complex):
        return [value_type.__name__, repr(value)]
    if value_type in (bytes, bytearray):
        return [value_type.__name__, list(value)]
    if value_type in (list, tuple, set, frozenset):
        return [value_type.__name__, [encode_value(item, objects) for item in value]]
    # Counter and defaultdict count as dictionaries.
    if isinstance(value, dict) and value_type.__module__ in ("builtins", "collections"):
        return [
            "dict",
            [[encode_value(k, objects), encode_value(v, objects)] for k, v in dict.items(value)],
        ]
    if value_type.__name__ == "deque" and value_type.__module__ == "collections":
        return ["list", [encode_value(item, objects) for item in value]]
    if value_type in ITERATOR_TYPES or (
        hasattr(value_type, "__next__") and value_type.__module__ == "itertools"
    ):
        # All items are sent at once, so that the program is not asked for each.
        items = [item for item, _ in zip(value, range(MAX_ITEMS), strict=False)]
        return ["iterator", [encode_value(item, objects) for item in items]]
    name = getattr(value, "__name__", "")
    if value_type is type and getattr(builtins, name, None) is value:
        return ["type", name]
    objects.append(value)
    return ["object", len(objects) - 1]


def decode_value(value: list[Any], make_object: Callable[[int], Any]) -> Any:
    """Decodes a value of `encode_value`. `make_object` maps the index of an object to a value."""
    type_name, content = value
    if type_name in ("NoneType", "bool", "str"):
        return content
    if type_name in ("int", "float", "complex"):
        return {"int": int, "float": float, "complex": complex}[type_name](content)
    if type_name in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[type_name](list(content))
    if type_name == "dict":
        return {decode_value(k, make_object): decode_value(v, make_object) for k, v in content}
    # A program may write answers of its own, so `eval` or another function is not looked up.
    if type_name == "type" and isinstance(getattr(builtins, content), type):
        return getattr(builtins, content)
    if type_name == "object":
        return make_object(content)
    items = [decode_value(item, make_object) for item in content]
    return iter(items) if type_name == "iterator" else CONTAINER_TYPES[type_name](items)


CONTAINER_TYPES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def main() -> None:
    """Serves questions until the pipe is closed.

    The command line holds the file descriptors to read from and write to, and the limit of
    processor time in seconds.
    """
    read_fd, write_fd, seconds = map(int, sys.argv[1:])
    questions = os.fdopen(read_fd, encoding="utf-8")
    answers = os.fdopen(write_fd, "w", encoding="utf-8")
    for resource_kind, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, 2**30),
        (resource.RLIMIT_FSIZE, 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(resource_kind, (limit, limit))
    # Recursive solutions may go deeper than Python's default of 1,000 calls.
    sys.setrecursionlimit(5000)
    # Tells `code.py` that a later end of this process is the program's doing.
    answers.write("ready\n")
    answers.flush()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    objects: list[Any] = []
    for line in questions:
        question = json.loads(line)
        try:
            if "program" in question:
                exec(compile(question["program"], "program", "exec"), namespace)
                modules = [name for name, value in namespace.items() if type(value) is type(sys)]
                callables = [name for name, value in namespace.items() if callable(value)]
                answer = {"names": callables, "modules": modules}
            else:
                arguments = [
                    decode_value(argument, objects.__getitem__)
                    for argument in question["arguments"]
                ]
                keywords = {
                    name: decode_value(argument, objects.__getitem__)
                    for name, argument in question["named"].items()
                }
                receiver_key = question["to"]
                receiver = (
                    namespace[receiver_key] if type(receiver_key) is str else objects[receiver_key]
                )
                match question["do"]:
                    case "get":
                        value = getattr(receiver, *arguments)
                    case "set":
                        value = setattr(receiver, *arguments)
                    case _:
                        value = receiver(*arguments, **keywords)
                answer = {"value": encode_value(value, objects)}
        # A program that calls `sys.exit` must not end this loop.
        except BaseException as error:  # noqa: BLE001 - any exception of the program is an answer
            answer = {"raised": type(error).__name__, "why": str(error)[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
