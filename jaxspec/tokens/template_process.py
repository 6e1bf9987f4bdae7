"""Script that renders a chat template, started by `chat_template.py`.

It reads and writes lines of JSON until its input ends.

A template is a program by an unknown author. Jinja's sandbox denies it files and Python's
internals, but limits neither time nor memory. Limits of the operating system do. They also stop a
single operation such as `10 ** (10 ** 10)`.
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
"""Maximum address space of the process in bytes."""
MAX_CHARACTERS = 10_000_000
"""Maximum number of characters of a rendered template."""
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
"""Errors that a template can raise, besides TemplateError.

RecursionError is a RuntimeError.
"""


def main() -> None:
    """Answers requests from standard input.

    The first line is the template. Each further line is a list of objects with variables. The
    command-line arguments are the seconds of processor time for each rendering, and the date. The
    date is such as 2026-11-27, or empty for the current one.
    """
    seconds, today = int(sys.argv[1]), sys.argv[2]
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The parent may still have prompts to render. This process ends when its input does.
        signal.signal(signal_number, signal.SIG_IGN)
    # A process that is ended at its limit of time would otherwise write a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # some systems cannot limit the address space
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
            # The template may have written the text, which may be long and have several lines.
            reply = {"error": " ".join(reason.split())[:_MAX_ERROR_CHARACTERS]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _limit_cpu_time(seconds: int) -> None:
    """Limits the processor time from now on.

    After `seconds`, or one more, the system ends this process.
    """
    # The system's limit counts whole seconds since the process started.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_seconds = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(
        resource.RLIMIT_CPU, (used_seconds + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1])
    )


def _compile_template(source: str, today: str) -> Template:
    # The options, names and filters of transformers, which templates are written for.
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
    # Renewed for every text, as a large batch would otherwise run out of time.
    _limit_cpu_time(seconds)
    text = template.render(**variables)
    # Memory allows much longer texts, which the parent would then have to encode.
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it makes {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(today: str, format: str) -> str:
    # Without a date, the local time, as in transformers.
    return (datetime.fromisoformat(today) if today else datetime.now()).strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Formats a value as JSON.

    Replaces Jinja's `tojson`, which escapes HTML characters.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(Extension):
    """The block `{% generation %}...{% endgeneration %}`.

    It marks the assistant's text for transformers, and changes no text.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


if __name__ == "__main__":
    main()
