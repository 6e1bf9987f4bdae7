"""A checkpoint's chat template, filled in a process of its own whose time and memory are
limited."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import named

SECONDS = 2
"""Processor time for compiling a template, and for filling it once; a usual one takes a
thousandth."""
_SCRIPT = Path(__file__).with_name("template_process.py")


class ChatTemplate:
    """A Jinja template; `source` names it in messages. It may be filled from several threads.

    Raises:
      ConfigError: the template is not valid.
    """

    def __init__(self, text: str, source: str) -> None:
        self._text, self._source = text, source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def fill(self, what: str, **names: Any) -> str:
        """The template filled with `names`, which are values of JSON and are called `what` in
        messages.

        Raises:
          ConfigError: the template refuses them, or takes more time or memory than a template
            should.
        """
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(names, f"refuses {what}")

    def _start(self) -> None:
        """Starts the process, and has it compile the template."""
        command = [sys.executable, "-P", str(_SCRIPT), str(SECONDS)]
        pipe, away = subprocess.PIPE, subprocess.DEVNULL
        # A session of its own: a Ctrl-C at the terminal is for who asks.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=away, start_new_session=True
        )
        weakref.finalize(self, _end, self._process)
        self._ask(self._text, "is not valid")

    def _ask(self, question: Any, trouble: str) -> str:
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
        answer = json.loads(line) if line.endswith(b"\n") else {"error": self._ended(process)}
        if "error" in answer:
            raise ConfigError(
                f"{self._source}: the chat template {trouble}: {named(answer['error'])}; correct"
                " chat_template"
            )
        return answer["text"]

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
