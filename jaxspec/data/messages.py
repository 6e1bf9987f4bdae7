"""Messages of a chat, in the layouts of published data, and parts of them that no prompt holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import parse_json, shown

Message = dict[str, Any]
Tools = list[dict[str, Any]]

_SPEAKERS = {"human": "user", "gpt": "assistant"}
_KEYS = {"from": "role", "value": "content"}
"""ShareGPT's and Magpie's names for speakers, and for the keys of a message."""


def messages_of(chat: Any) -> list[Message] | None:
    """Returns the messages of a chat with `role` and `content`; None if it is no chat.

    Both usual layouts are read. Content in parts is joined if all parts are texts. Other keys
    (tool_calls, reasoning_content) are kept for the chat template. A null counts as an absent key,
    and absent content as an empty text.
    """
    found = []
    for message in chat if isinstance(chat, list) else [None]:
        if not isinstance(message, dict):
            return None
        held = without_nulls(message)
        for key, name in _KEYS.items():
            if key in held and name not in held:
                held[name] = held.pop(key)
        role = held.get("role")
        if not isinstance(role, str):
            return None
        held["role"] = _SPEAKERS.get(role, role)
        if "content" in held:
            held["content"] = _joined(held["content"])
        elif not held.get("tool_calls"):
            held["content"] = ""
        elif "content" in message:  # templates look for a null beside calls of tools
            held["content"] = None
        found.append(held)
    return found


def without_nulls(value: Any) -> Any:
    """Returns a value of JSON without the keys that are null; parquet writes absent keys so."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _joined(content: Any) -> Any:
    """One text of a content in parts; anything else as it is."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if whole else content


def tools_of(value: Any) -> Tools | None:
    """Returns the tools of a row, given as a list of objects or as its JSON text; None if there are
    none.

    Raises `ConfigError` for a value of another kind.
    """
    try:
        given = value.strip() if isinstance(value, str) else value
        tools = parse_json(given) if given and isinstance(given, str) else given
        parts = tools if isinstance(tools, list) else [tools] if tools else []
        parts = [parse_json(part) if isinstance(part, str) else part for part in parts]
    except ValueError:
        parts = [None]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError(
            f"column 'tools' holds {shown(value)}; give a list of objects, its JSON text, or null"
        )
    return without_nulls(parts) or None


Render = Callable[[Sequence[Message], Tools | None], str]


class Unrendered:
    """Counts chats by the parts that `render` does not write.

    It is asked once for all chats of the same roles and keys.
    """

    def __init__(self, render: Render) -> None:
        self._render, self._by_shape = render, dict[str, list[str]]()
        self.counts = Counter[str]()

    def add(self, chat: Sequence[Message], tools: Tools | None) -> None:
        """Counts the parts of one chat."""
        if not tools and [message.keys() for message in chat] == [{"role", "content"}]:
            return
        present = [{name: bool(part) for name, part in each.items()} for each in chat]
        shape = json.dumps([[each["role"] for each in chat], present, bool(tools)])
        if shape not in self._by_shape:
            self._by_shape[shape] = unrendered_parts(self._render, chat, tools)
        self.counts.update(self._by_shape[shape])


def unrendered_parts(
    render: Render,
    chat: Sequence[Message],
    tools: Tools | None,
) -> list[str]:
    """Returns names of the parts of a chat that change nothing in its prompt.

    A part is a message, a key of a message, or the tools; empty ones are no parts.
    """
    prompt = render(chat, tools)

    def is_unused(chat: Sequence[Message], tools: Tools | None) -> bool:
        try:
            return render(chat, tools) == prompt
        except ConfigError:  # a template that misses the part has looked at it
            return False

    names = ["the column 'tools'"] if tools and is_unused(chat, None) else []
    for place, message in enumerate(chat):
        role, before, after = message["role"], chat[:place], chat[place + 1 :]
        if len(chat) > 1 and is_unused([*before, *after], tools):
            names.append(f"messages of role {shown(role)}")
            continue
        for key in message.keys() - {"role", "content"}:
            bare = {name: part for name, part in message.items() if name != key}
            if message[key] not in ("", [], {}) and is_unused([*before, bare, *after], tools):
                names.append(f"the key {shown(key)} of messages of role {shown(role)}")
    return sorted(set(names))
