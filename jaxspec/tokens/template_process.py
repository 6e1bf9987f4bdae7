"""The process that fills a chat template, run as a script by `chat_template.py`: it reads and
writes lines of JSON until its input ends.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from files and from
Python's insides, but not from running for ever or from filling the memory; limits of the operating
system do, also inside a single operation such as `10 ** (10 ** 10)`.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_LIMIT = 2**30
MAX_CHARACTERS = 10_000_000
"""Characters of a filled template."""
_MAX_ERROR_CHARACTERS = 300
_ERRORS = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        NameError,
        RuntimeError,
        SyntaxError,
        TypeError,
    ),
    ValueError,
)
"""What a template can raise, beside its own errors; RecursionError is a RuntimeError."""


def main() -> None:
    """The first line is the template; each further one has a list of names to fill it with. The
    arguments are the seconds that each may take, and the day (2026-11-27; empty: the current
    one)."""
    seconds, today = int(sys.argv[1]), sys.argv[2]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # who asks may still have work to finish; the end of the input is the end
        signal.signal(signal_number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # not every system limits the address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    template = None
    for line in sys.stdin.buffer:
        _limit_cpu_time(seconds)
        try:
            if template is None:
                template, reply = _compile_template(json.loads(line), today), {"texts": []}
            else:
                reply = {
                    "texts": [
                        _render_template(template, variables, seconds)
                        for variables in json.loads(line)
                    ]
                }
        except (TemplateError, *_ERRORS) as error:
            reason = (
                f"it needs more than {MEMORY_LIMIT:,} bytes"
                if isinstance(error, MemoryError)
                else str(error) or type(error).__name__
            )
            reply = {"error": " ".join(reason.split())[:_MAX_ERROR_CHARACTERS]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _limit_cpu_time(seconds: int) -> None:
    """From here on, so many seconds of processor time, or one more, until the system ends this
    process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_seconds = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(
        resource.RLIMIT_CPU, (used_seconds + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1])
    )


def _compile_template(source: str, today: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    clock = partial(_strftime_now, today)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": clock}
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _render_template(template: Template, variables: dict[str, Any], seconds: int) -> str:
    _limit_cpu_time(seconds)
    text = template.render(**variables)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it makes {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(today: str, format: str) -> str:
    # without a day the local time, as transformers gives it
    return (datetime.fromisoformat(today) if today else datetime.now()).strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which a prompt must not."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks for transformers what the assistant
    wrote, changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


if __name__ == "__main__":
    main()
