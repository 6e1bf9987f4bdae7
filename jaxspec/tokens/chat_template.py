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
from jaxspec.inputs.json_keys import Keys, listed, named, shown

SECONDS = 2
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
            self._start()

    def on_day(self, today: str) -> ChatTemplate:
        """The same template with another day."""
        return ChatTemplate(self._text, self._source, today)

    def fill(self, what: str, **names: Any) -> str:
        """The template filled with `names`, which are values of JSON and are called `what` in
        messages.

        Raises:
          ConfigError: the template refuses them, or takes more time or memory than a template
            should.
        """
        return self.fill_each(what, [names])[0]

    def fill_each(self, what: str, names: Sequence[Mapping[str, Any]]) -> list[str]:
        """The template filled with each of some names; raises as `fill` does, for any of them."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(list(names), f"refuses {what}")

    def _start(self) -> None:
        """Starts the process, and has it compile the template."""
        command = [sys.executable, "-P", str(_SCRIPT), str(SECONDS), self.today]
        pipe, away = subprocess.PIPE, subprocess.DEVNULL
        # A session of its own: a Ctrl-C at the terminal is for who asks.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=away, start_new_session=True
        )
        weakref.finalize(self, _end, self._process)
        self._ask(self._text, "is not valid")

    def _ask(self, question: Any, trouble: str) -> list[str]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # noqa: PT018
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except RecursionError as error:
            raise ConfigError(
                f"{self._source}: the chat template cannot be given what is nested so deeply;"
                " flatten it"
            ) from error
        whole = line.endswith(b"\n")
        answer: dict[str, Any] = json.loads(line) if whole else {"error": self._ended(process)}
        if "error" in answer:
            raise ConfigError(
                f"{self._source}: the chat template {trouble}: {named(answer['error'])}; correct"
                " chat_template"
            )
        return answer["texts"]

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        """Why the process is gone; the next question starts another."""
        self._process = None
        _end(process)
        if process.returncode == -signal.SIGXCPU:
            return f"it takes more than {SECONDS} seconds of processor time"
        return f"its process ended with status {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process whose input has ended, so that nothing is left of it."""
    with process:
        pass


def template_of(settings: Mapping[str, Any], source: str) -> str:
    """Return the chat template in the content of tokenizer_config.json; empty if there is none."""
    found, where = settings.get("chat_template"), f"{source}/tokenizer_config.json"
    if isinstance(found, list):  # several named templates
        entries = [
            Keys(entry, f"{where}, chat_template") for entry in found if isinstance(entry, Mapping)
        ]
        by_name = {entry.text("name"): entry.text("template") for entry in entries}
        told = f"chat_template names {listed(by_name) or 'no template'}, and none 'default'"
        require(
            len(entries) == len(found) and "default" in by_name,
            f"{where}: {told}; call the one to use 'default'",
        )
        found = by_name["default"]
    require(
        isinstance(found, str | None),
        f"{where}: chat_template is {shown(found)}; it must be a string, or a list of objects with"
        " 'name' and 'template'",
    )
    return found or ""


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
