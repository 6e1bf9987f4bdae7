"""Renders a chat template in a separate process.

The time and memory of that process are limited.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import JsonObject, format_name, format_value, join_names

CPU_SECONDS = 2
"""Maximum processor time, in seconds, to compile a template or to render it once.

A typical template takes a thousandth of it.
"""
_SCRIPT = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A Jinja chat template.

    `source` names it in error messages. `today` (such as 2026-11-27) is the date that it reads. If
    `today` is empty, it reads the date of rendering. Several threads may render it.

    Raises:
      ConfigError: the template is not valid.
    """

    def __init__(self, text: str, source: str, today: str = "") -> None:
        self._text, self._source, self.today = text, source, today
        self.reads_clock = "strftime_now" in text
        # The process answers one request at a time, and replies do not name their request.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start_process()

    def with_date(self, date: str) -> ChatTemplate:
        """Returns the same template with another date."""
        return ChatTemplate(self._text, self._source, date)

    def render(self, subject: str, **variables: Any) -> str:
        """Renders the template with `variables`.

        These are JSON values. `subject` names them in error messages.

        Raises:
          ConfigError: the template refuses them, or exceeds its time or memory.
        """
        return self.render_batch(subject, [variables])[0]

    def render_batch(self, subject: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """Renders the template once for each item of `variables`.

        Raises:
          ConfigError: `render` would raise it for one of the items.
        """
        with self._lock:
            # The previous process may have ended at its limit of time.
            if self._process is None:
                self._start_process()
            return self._send_request(list(variables), f"refuses {subject}")

    def _start_process(self) -> None:
        """Starts the process and compiles the template in it."""
        command = [sys.executable, "-P", str(_SCRIPT), str(CPU_SECONDS), self.today]
        pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
        # In a new session, so that Ctrl-C at the terminal does not reach it. This process may
        # still have prompts to render before it stops.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=devnull, start_new_session=True
        )
        # Also runs when Python exits, so that no process is left behind.
        weakref.finalize(self, _wait_for_exit, self._process)
        self._send_request(self._text, "is not valid")

    def _send_request(self, request: Any, failure: str) -> list[str]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: PT018
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""  # the process ended before it read the request
        except RecursionError as error:
            raise ConfigError(
                f"{self._source}: messages or tools are nested too deeply for the chat template;"
                " flatten them"
            ) from error
        # A process that ends while it replies leaves a line without its newline, or none.
        is_complete = line.endswith(b"\n")
        reply: dict[str, Any] = (
            json.loads(line) if is_complete else {"error": self._discard_process(process)}
        )
        if "error" in reply:
            raise ConfigError(
                f"{self._source}: the chat template {failure}: {format_name(reply['error'])};"
                " correct chat_template"
            )
        return reply["texts"]

    def _discard_process(self, process: subprocess.Popen[bytes]) -> str:
        """Forgets the process and returns why it ended. The next request starts another."""
        self._process = None
        # The return code is known only after waiting.
        _wait_for_exit(process)
        if process.returncode == -signal.SIGXCPU:
            return f"it takes more than {CPU_SECONDS} seconds of processor time"
        return f"its process ended with status {process.returncode}"


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Closes the process's input and waits until it ends."""
    with process:
        pass


def template_from_settings(settings: Mapping[str, Any], source: str) -> str:
    """Returns the chat template of tokenizer_config.json.

    `settings` is the content of the file. The result is empty if it has no template.

    Raises:
      ConfigError: the key is of another type, or a list without a template named 'default'.
    """
    template, config_file = settings.get("chat_template"), f"{source}/tokenizer_config.json"
    if isinstance(template, list):  # several named templates
        entries = [
            JsonObject(entry, f"{config_file}, chat_template")
            for entry in template
            if isinstance(entry, Mapping)
        ]
        templates_by_name = {
            entry.get_string("name"): entry.get_string("template") for entry in entries
        }
        reason = (
            f"chat_template names {join_names(templates_by_name) or 'no template'}, and none"
            " 'default'"
        )
        require(
            len(entries) == len(template) and "default" in templates_by_name,
            f"{config_file}: {reason}; call the one to use 'default'",
        )
        template = templates_by_name["default"]
    require(
        isinstance(template, str | None),
        f"{config_file}: chat_template is {format_value(template)}; it must be a string, or a list"
        " of objects with 'name' and 'template'",
    )
    return template or ""


def read_template(file: Path) -> str:
    """Reads chat_template.jinja.

    Raises:
      ConfigError: it is no regular file, is not in UTF-8, or is empty.
    """
    # Reading a pipe would wait for ever.
    require(
        file.is_file(),
        f"{file} is no regular file, or a link to none; download it again, or remove it",
    )
    try:
        template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: not a text in UTF-8 ({error}); download the file again"
        ) from error
    # An empty file would hide the template of tokenizer_config.json.
    if not template.strip():
        raise ConfigError(
            f"{file} is empty; download the file again, or remove it to use the template of"
            " tokenizer_config.json"
        )
    return template
