"""A checkpoint's chat template, filled in a process of its own whose time and memory are
limited."""

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
"""Processor time for compiling a template, and for filling it once; a usual one takes a
thousandth."""
_SCRIPT = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A Jinja template; `source` names it in messages, and `today` (2026-11-27) is its day; empty:
    the day on which it is filled. It may be filled from several threads.

    Raises:
      ConfigError: the template is not valid.
    """

    def __init__(self, text: str, source: str, today: str = "") -> None:
        self._text, self._source, self.today = text, source, today
        self.reads_clock = "strftime_now" in text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start_process()

    def with_date(self, date: str) -> ChatTemplate:
        """The same template with another day."""
        return ChatTemplate(self._text, self._source, date)

    def render(self, subject: str, **variables: Any) -> str:
        """The template filled with `variables`, which are values of JSON and are called `subject`
        in messages.

        Raises:
          ConfigError: the template refuses them, or takes more time or memory than a template
            should.
        """
        return self.render_batch(subject, [variables])[0]

    def render_batch(self, subject: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template filled with each of some `variables`; raises as `render` does, for any."""
        with self._lock:
            if self._process is None:
                self._start_process()
            return self._send_request(list(variables), f"refuses {subject}")

    def _start_process(self) -> None:
        """Starts the process, and has it compile the template."""
        command = [sys.executable, "-P", str(_SCRIPT), str(CPU_SECONDS), self.today]
        pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
        # A session of its own: a Ctrl-C at the terminal is for who asks.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=devnull, start_new_session=True
        )
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
            line = b""
        except RecursionError as error:
            raise ConfigError(
                f"{self._source}: the chat template cannot be given what is nested so deeply;"
                " flatten it"
            ) from error
        is_complete = line.endswith(b"\n")
        reply: dict[str, Any] = (
            json.loads(line) if is_complete else {"error": self._describe_exit(process)}
        )
        if "error" in reply:
            raise ConfigError(
                f"{self._source}: the chat template {failure}: {format_name(reply['error'])};"
                " correct chat_template"
            )
        return reply["texts"]

    def _describe_exit(self, process: subprocess.Popen[bytes]) -> str:
        """Why the process is gone; the next question starts another."""
        self._process = None
        _wait_for_exit(process)
        if process.returncode == -signal.SIGXCPU:
            return f"it takes more than {CPU_SECONDS} seconds of processor time"
        return f"its process ended with status {process.returncode}"


def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process whose input has ended, so that nothing is left of it."""
    with process:
        pass


def template_from_settings(settings: Mapping[str, Any], source: str) -> str:
    """Return the chat template in the content of tokenizer_config.json; empty if there is none."""
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
    """Return the text of chat_template.jinja, which is there."""
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
    if not template.strip():
        raise ConfigError(
            f"{file} is empty; download the file again, or remove it to use the template of"
            " tokenizer_config.json"
        )
    return template
