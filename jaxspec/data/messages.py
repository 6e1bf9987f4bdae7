"""Parser of chat messages in the layouts of published data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import format_value, parse_json

Message = dict[str, Any]
Tools = list[dict[str, Any]]

_SPEAKERS = {"human": "user", "gpt": "assistant"}
_KEYS = {"from": "role", "value": "content"}
"""Names of ShareGPT and Magpie for the keys of a message. `_SPEAKERS` has those for roles."""


def parse_messages(chat: Any) -> list[Message] | None:
    """Parses the messages of a chat.

    Returns None if the value is not a chat. Messages may have the keys `role` and `content`, or
    ShareGPT's `from` and `value`. The result has the former. Content in parts is joined if all
    parts are texts. Other keys (tool_calls, reasoning_content) are kept for the chat template. A
    null counts as a missing key. Missing content becomes an empty text, unless the message has tool
    calls.
    """
    messages = []
    for message in chat if isinstance(chat, list) else [None]:
        if not isinstance(message, dict):
            return None
        normalized = drop_nulls(message)
        for key, name in _KEYS.items():
            if key in normalized and name not in normalized:
                normalized[name] = normalized.pop(key)
        role = normalized.get("role")
        if not isinstance(role, str):
            return None
        normalized["role"] = _SPEAKERS.get(role, role)
        if "content" in normalized:
            normalized["content"] = _join_content(normalized["content"])
        elif not normalized.get("tool_calls"):
            normalized["content"] = ""
        # Templates test whether the content of a message with tool calls is null.
        elif "content" in message:
            normalized["content"] = None
        messages.append(normalized)
    return messages


def drop_nulls(value: Any) -> Any:
    """Removes keys with null values from JSON."""
    # Rows of a parquet file have all keys, with nulls for the missing ones.
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _join_content(content: Any) -> Any:
    """Joins content whose parts are all texts. Other content is unchanged."""
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        return content
    texts = [item.get("text") for item in content if item.get("type", "text") == "text"]
    has_only_texts = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if has_only_texts else content


def parse_tools(value: Any) -> Tools | None:
    """Parses the tools of a row.

    The value is an object or a list of objects, or the JSON text of these. Returns None if there
    are no tools.

    Raises:
      ConfigError: the value is anything else.
    """
    try:
        raw_tools = value.strip() if isinstance(value, str) else value
        tools = parse_json(raw_tools) if raw_tools and isinstance(raw_tools, str) else raw_tools
        entries = tools if isinstance(tools, list) else [tools] if tools else []
        entries = [parse_json(entry) if isinstance(entry, str) else entry for entry in entries]
    except ValueError:
        entries = [None]
    if not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(
            f"column 'tools' holds {format_value(value)}; give a list of objects, its JSON text, or"
            " null"
        )
    return drop_nulls(entries) or None


Render = Callable[[Sequence[Message], Tools | None], str]


class UnrenderedCounter:
    """Counter of parts that `render` leaves out."""

    def __init__(self, render: Render) -> None:
        self._render, self._parts_by_shape = render, dict[str, list[str]]()
        self.counts = Counter[str]()
        """Number of chats by the part that is left out."""

    def count_chat(self, chat: Sequence[Message], tools: Tools | None) -> None:
        """Counts the parts of a chat that are left out."""
        # A single plain message has no parts to leave out.
        if not tools and [message.keys() for message in chat] == [{"role", "content"}]:
            return
        # Each part takes a rendering to test. Chats with the same roles and filled keys share the
        # result.
        filled_keys = [{name: bool(value) for name, value in message.items()} for message in chat]
        shape = json.dumps([[message["role"] for message in chat], filled_keys, bool(tools)])
        if shape not in self._parts_by_shape:
            self._parts_by_shape[shape] = find_unrendered_parts(self._render, chat, tools)
        self.counts.update(self._parts_by_shape[shape])


def find_unrendered_parts(
    render: Render,
    chat: Sequence[Message],
    tools: Tools | None,
) -> list[str]:
    """Names the parts without effect on the prompt.

    A part is a message, a key of a message, or the tools, unless it is empty.
    """
    prompt = render(chat, tools)

    def is_unused(chat: Sequence[Message], tools: Tools | None) -> bool:
        try:
            return render(chat, tools) == prompt
        except ConfigError:  # a template that fails without the part has read it
            return False

    names = ["the column 'tools'"] if tools and is_unused(chat, None) else []
    for index, message in enumerate(chat):
        role, earlier, later = message["role"], chat[:index], chat[index + 1 :]
        if len(chat) > 1 and is_unused([*earlier, *later], tools):
            names.append(f"messages of role {format_value(role)}")
            continue
        for key in message.keys() - {"role", "content"}:
            stripped = {name: value for name, value in message.items() if name != key}
            if message[key] not in ("", [], {}) and is_unused([*earlier, stripped, *later], tools):
                names.append(
                    f"the key {format_value(key)} of messages of role {format_value(role)}"
                )
    return sorted(set(names))
