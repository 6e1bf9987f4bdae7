"""Where in a rendered chat the assistant's own text stands: what a chat template writes around a
turn is found by its own rendering of chats with and without an answer."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import shown

PROBE = "jaxspec7probe"
"""A message that occurs in no chat template."""


class Turn(NamedTuple):
    """How a chat template writes one turn of the assistant: header, what is put in its mouth, its
    own text, closing."""

    header: str
    begun: str
    """What the generation prompt has beyond the header (Qwen3 without thinking: an empty think
    block); not every turn of a chat has it."""
    closing: str
    """End of the turn, with what closes its line."""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where in a rendered chat the assistant's own text stands, with its closing."""
        header, begun, closing = self
        spans: list[tuple[int, int]] = []
        place = text.find(header)
        while place >= 0:
            start = place + len(header)
            start += len(begun) if text.startswith(begun, start) else 0
            end = text.find(closing, start)
            if end < 0:
                break
            spans.append((start, end + len(closing)))
            place = text.find(header, spans[-1][1])
        return spans


def turn_of(fill: Callable[..., str], source: str) -> Turn:
    """What the template that `fill` renders writes around an answer.

    Raises:
      ConfigError: it does not show that; `source` names the template.
    """
    user, assistant = ({"role": role, "content": PROBE} for role in ("user", "assistant"))

    def filled(*chat: dict[str, str], ask: bool = False) -> str:
        return fill(list(chat), "a chat", add_generation_prompt=ask)

    asked, bare = filled(user, ask=True), filled(user)
    answered, went_on = filled(user, assistant), filled(user, assistant, user)
    prompt = asked.removeprefix(bare)
    opening, _, rest = went_on.removeprefix(bare).partition(PROBE)
    header, closing = min(prompt, opening, key=len), answered.rpartition(PROBE)[2]
    begins_alike = asked.startswith(bare) and went_on.startswith(bare)
    same_header = prompt.startswith(header) and opening.startswith(header)
    found = header.strip() and closing and rest.startswith(closing)
    if not (begins_alike and same_header and found):
        raise ConfigError(
            f"{source}: the chat template does not show what the assistant writes: a"
            f" generation prompt adds {shown(prompt)}, an answer follows {shown(opening)} and"
            f" ends with {shown(closing)}; correct chat_template, or give text instead of"
            " messages"
        )
    return Turn(header, prompt.removeprefix(header), closing)


def require_rendered(render: Callable[[str], str], file: Path) -> None:
    """Refuses the chat template of a file if the prompts of two problems are the same."""
    try:
        one, other = (render(f"{PROBE}{number}") for number in "12")
    except ConfigError:  # a template that refuses them may still take a whole chat
        return
    require(
        one != other,
        f"{file}: the chat template writes {shown(one)} for any problem; correct it so that it"
        " writes the user's message",
    )
