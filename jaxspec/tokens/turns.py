"""Finds the assistant's text in a rendered chat.

The text around a turn is inferred from the chat template's renderings of chats with and without an
answer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_value

PROBE = "jaxspec7probe"
"""Message for test renderings, which occurs in no chat template."""


class TurnFormat(NamedTuple):
    """Text that a chat template writes around a turn of the assistant.

    A turn is header, prefix, the assistant's own text, and closing.
    """

    header: str
    """Beginning of every turn."""
    prefix: str
    """Text of the generation prompt after the header.

    For Qwen3 without thinking it is an empty think block. Not every turn of a chat has it.
    """
    closing: str
    """End of the turn, with the end of its line."""

    def find_spans(self, text: str) -> list[tuple[int, int]]:
        """Locates the assistant's own text in a rendered chat.

        Returns the start and stop of each turn's text, with its closing.
        """
        header, prefix, closing = self
        spans: list[tuple[int, int]] = []
        position = text.find(header)
        while position >= 0:
            span_start = position + len(header)
            # The assistant did not write the prefix, so it is not learned.
            span_start += len(prefix) if text.startswith(prefix, span_start) else 0
            span_stop = text.find(closing, span_start)
            # The caller compares the number of spans with that of the messages.
            if span_stop < 0:
                break
            spans.append((span_start, span_stop + len(closing)))
            position = text.find(header, spans[-1][1])
        return spans


def infer_turn_format(render: Callable[..., str], source: str) -> TurnFormat:
    """Infers the text that a template writes around an answer.

    `render` renders the template. `source` names it in error messages.

    Raises:
      ConfigError: the renderings do not show that text.
    """
    user, assistant = ({"role": role, "content": PROBE} for role in ("user", "assistant"))

    def render_messages(*messages: dict[str, str], add_prompt: bool = False) -> str:
        return render(list(messages), "a chat", add_generation_prompt=add_prompt)

    prompted_text, user_text = render_messages(user, add_prompt=True), render_messages(user)
    answer_text, dialog_text = (
        render_messages(user, assistant),
        render_messages(user, assistant, user),
    )
    generation_prompt = prompted_text.removeprefix(user_text)
    opening, _, remainder = dialog_text.removeprefix(user_text).partition(PROBE)
    # The generation prompt may have more than the header of an answer, or less. Both must begin
    # alike, so the shorter one is the header.
    header, closing = min(generation_prompt, opening, key=len), answer_text.rpartition(PROBE)[2]
    # The last turn must end like one in the middle of a chat, and rendering another message must
    # not change the text before it.
    has_same_start = prompted_text.startswith(user_text) and dialog_text.startswith(user_text)
    has_same_header = generation_prompt.startswith(header) and opening.startswith(header)
    has_closing = header.strip() and closing and remainder.startswith(closing)
    if not (has_same_start and has_same_header and has_closing):
        raise ConfigError(
            f"{source}: the chat template does not show what the assistant writes: a generation"
            f" prompt adds {format_value(generation_prompt)}, an answer follows"
            f" {format_value(opening)} and ends with {format_value(closing)}; correct"
            " chat_template, or give text instead of messages"
        )
    return TurnFormat(header, generation_prompt.removeprefix(header), closing)


def require_problem_in_prompt(render: Callable[[str], str], file: Path) -> None:
    """Refuses a chat template whose prompts do not depend on the problem.

    Raises:
      ConfigError: the prompts of two problems are equal. The message names `file`.
    """
    try:
        first_prompt, second_prompt = (render(f"{PROBE}{number}") for number in "12")
    except ConfigError:  # a template that refuses these prompts may still accept a whole chat
        return
    require(
        first_prompt != second_prompt,
        f"{file}: the chat template writes {format_value(first_prompt)} for any problem; correct it"
        " so that it writes the user's message",
    )
