"""Text to token ids and back: a Hugging Face tokenizer.json with its chat template, and the small
one of the built-in tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import (
    Keys,
    is_whole,
    is_whole_text,
    listed,
    read_json,
    read_keys,
    shown,
)
from jaxspec.system.files import expanded
from jaxspec.tokens.chat_template import ChatTemplate
from jaxspec.tokens.stop_strings import StopTable, stop_table, token_bytes
from jaxspec.tokens.turns import PROBE, Turn, turn_of

CHARACTERS = "0123456789+-=,#;?"
"""Of generated arithmetic."""
PROGRAM_CHARACTERS = "0123456789+-*=(),: \n`abdeflmnrstux"
"""Of generated programs, which have their own so that the ids of arithmetic stay as they are."""
SPECIALS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""What `load_tokenizer` reads."""
# base models of the Qwen family end with it, whatever the chat's own end token
BASE_END = "<|endoftext|>"


class Tokenizer:
    """A tokenizer with its ends, its padding and its chat template; `source` names it in messages.

    `settings` is the content of tokenizer_config.json (chat template included); `end_ids` are ends
    known from elsewhere; `enable_thinking` is handed to the chat template; `prompt_format` is as in
    the setting `data.prompt_format`.
    Raises `ConfigError` where no end token is known, or one is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        source: str,
        end_ids: Iterable[int] = (),
        enable_thinking: bool = True,
        prompt_format: str = "chat",
    ) -> None:
        self._backend, self._settings = backend, dict(settings)
        self.source, self.enable_thinking = source, enable_thinking
        self._prompt_format = prompt_format
        self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        require(
            self.size > 0,
            f"{source}/tokenizer.json: the vocabulary is empty; download the file again",
        )
        self._specials = {name: self._token(name) for name in SPECIALS}
        eos = self._id("eos_token")
        ends = [*([] if eos is None else [eos]), *end_ids]
        if not ends:
            raise ConfigError(
                f"{source}/tokenizer_config.json: no eos_token, so no response would ever end; add"
                f" the key, such as {BASE_END!r}"
            )
        if bad := [end for end in ends if not 0 <= end < self.size]:
            raise ConfigError(
                f"{source}/generation_config.json: eos_token_id {bad[0]} is beyond the tokenizer's"
                f" {self.size} tokens; correct the key"
            )
        base_end = backend.token_to_id(BASE_END)
        if base_end is not None:
            ends.append(base_end)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        pad = self._id("pad_token")
        self.pad_id: int = pad if pad is not None else self.stop_ids[-1]
        keys = Keys(self._settings, f"{source}/tokenizer_config.json")
        bos = self._id("bos_token") if keys.flag("add_bos_token", True) else None
        self.bos_ids: tuple[int, ...] = () if bos is None else (bos,)
        self._template = self._compile_template()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens are recognised where they are written out, and
        none are added."""
        return self._encoded(text).ids

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of `ids` without special tokens; ids that have no token (padded rows of
        the embedding) are left out."""
        dropped = {*self.stop_ids, self.pad_id}
        kept = [i for i in map(index, ids) if 0 <= i < self.size and i not in dropped]
        return self._backend.decode(kept, skip_special_tokens=True)

    def stop_table(self, strings: Sequence[str]) -> StopTable | None:
        """Return what finds `strings` in the text that `decode` gives: see
        `stop_strings.stop_table`."""
        added = self._backend.get_added_tokens_decoder().items()
        left_out = {*self.stop_ids, self.pad_id, *(i for i, token in added if token.special)}
        pieces = token_bytes(self._backend, self.size, left_out) if strings else []
        return stop_table(strings, pieces, self.source)

    def render(self, problem: str | Sequence[Mapping[str, str]]) -> str:
        """Return `problem`, a text or the messages of a chat, as a prompt: by the chat template; or
        behind the beginning token, where there is none or another format is asked for.

        Raises `ConfigError` for several messages without a template.
        """
        if self._prompt_format == "chat" and self._template is not None:
            whole = isinstance(problem, str)
            messages = [{"role": "user", "content": problem}] if whole else problem
            what = "a single user message" if whole else "these messages"
            return self._fill(self._template, messages, what, add_generation_prompt=True)
        if not isinstance(problem, str):
            require(
                len(problem) == 1,
                f"a chat of {len(problem)} messages needs a chat template, and {self._why_none};"
                " give the last message alone",
            )
            problem = problem[0]["content"]
        if self._prompt_format not in ("chat", "raw"):
            problem = self._prompt_format.replace("{problem}", problem)
        return self._specials["bos_token"] + problem if self.bos_ids else problem

    @property
    def _why_none(self) -> str:
        if self._template is None:
            return f"{self.source} has none"
        return f"data.prompt_format is {shown(self._prompt_format)}"

    def chat(self, problem: str) -> list[int]:
        """Return the ids of `render(problem)`."""
        return self.encode(self.render(problem))

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a whole chat, and True at those that the assistant wrote: its text, the
        end of its turn, the end of that line.

        `messages` and `tools` are what the chat template reads (role, content, and where it knows
        them tool_calls, reasoning_content); special tokens in them are recognised as in `encode`.
        What the generation prompt already holds is not the assistant's.
        Raises `ConfigError` where the template, or a message that imitates it, does not let each
        turn be found.
        """
        if self._template is None:
            raise ConfigError(
                f"{self.source}: there is no chat template for messages; add chat_template to"
                " tokenizer_config.json"
            )
        text = self._fill(
            self._template, messages, "these messages", tools=tools, add_generation_prompt=False
        )
        spans = self._turn.spans(text)
        turns = sum(message.get("role") == "assistant" for message in messages)
        if len(spans) != turns:
            raise ConfigError(
                f"{self.source}: the chat template writes {len(spans)} turns of the assistant for"
                f" {turns} messages; every one must be written with {shown(self._turn.header)}"
                f" before and {shown(self._turn.closing)} after it, and no message may hold these"
            )
        encoding = self._encoded(text)
        written = [
            any(start <= first < end for start, end in spans) for first, _ in encoding.offsets
        ]
        return encoding.ids, written

    def unknown(self, text: str) -> str:
        """Return the characters of `text` that the vocabulary cannot express, each once."""
        unk = self._id("unk_token")
        return "".join(c for c in dict.fromkeys(text) if unk is not None and unk in self.encode(c))

    def check_vocab(self, vocab: int, checkpoint: str = "") -> None:
        """Raise `ConfigError` if a model of `vocab` rows, of a `checkpoint` or not, lacks some
        token; more rows than tokens are fine."""
        holds, remedy = "model.vocab", f"set --model.vocab {self.size} or more"
        if checkpoint:
            holds = f"vocab_size in {checkpoint}/config.json"
            resized = f"resize_token_embeddings({self.size}), then save_pretrained"
            remedy = f"give the checkpoint with more rows (transformers: {resized})"
            if Path(self.source) != Path(checkpoint):
                remedy = (
                    f"leave out --data.tokenizer, so that the checkpoint's is used, or {remedy}"
                )
        require(
            self.size <= vocab,
            f"{holds} is {vocab}, but the tokenizer {self.source} has {self.size} tokens; {remedy}",
        )

    def save(self, folder: str) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`, which is made if absent."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(
            json.dumps(self._settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def _encoded(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except Exception as error:
            what = f"{self.source}/tokenizer.json cannot encode {shown(text)}"
            _refuse(error, what, "correct the text, or the tokenizer")
            raise

    def _token(self, name: str) -> str:
        """Return the text of a named special token; published files write it as a string, or as an
        object with `content`."""
        token = self._settings.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if (
            not isinstance(text, str | None)
            or (isinstance(token, Mapping) and not text)
            or not is_whole_text(text or "")
        ):
            wanted = "a string of whole characters, an object with such a 'content', or null"
            raise ConfigError(
                f"{self.source}/tokenizer_config.json: {name} is {shown(token)}; it must be"
                f" {wanted}"
            )
        return text or ""

    def _id(self, name: str) -> int | None:
        token = self._specials[name]
        if not token:
            return None
        found = self._backend.token_to_id(token)
        if found is None:
            raise ConfigError(
                f"{self.source}/tokenizer_config.json: {name} {shown(token)} is not in"
                " tokenizer.json; correct the key or add the token"
            )
        return found

    def _fill(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], what: str, **names: Any
    ) -> str:
        return template.fill(
            what, messages=messages, enable_thinking=self.enable_thinking, **names, **self._specials
        )

    @cached_property
    def _turn(self) -> Turn:
        assert self._template is not None, "only asked for where there is one"
        return turn_of(partial(self._fill, self._template), self.source)

    def _compile_template(self) -> ChatTemplate | None:
        found, where = self._settings.get("chat_template"), f"{self.source}/tokenizer_config.json"
        if isinstance(found, list):  # several named templates
            entries = [
                Keys(entry, f"{where}, chat_template")
                for entry in found
                if isinstance(entry, Mapping)
            ]
            by_name = {entry.text("name"): entry.text("template") for entry in entries}
            named = f"chat_template names {listed(by_name) or 'no template'}, and none 'default'"
            require(
                len(entries) == len(found) and "default" in by_name,
                f"{where}: {named}; call the one to use 'default'",
            )
            found = by_name["default"]
        wanted = "a string, or a list of objects with 'name' and 'template'"
        require(
            isinstance(found, str | None),
            f"{where}: chat_template is {shown(found)}; it must be {wanted}",
        )
        return ChatTemplate(found, self.source) if found else None


def load_tokenizer(
    folder: str, enable_thinking: bool = True, prompt_format: str = "chat"
) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; `enable_thinking` is handed to its chat
    template, and `prompt_format` is as in the setting `data.prompt_format`.

    Reads tokenizer.json, and where present tokenizer_config.json, chat_template.jinja and the ends
    of generation_config.json.
    Raises `ConfigError` for a missing or damaged file and for a tokenizer without an end token.
    """
    path, config, chat_template, generation_config = (
        expanded(folder, "data.tokenizer") / name for name in FILES
    )
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer is {folder!r}, but there is no file {path}; give the folder of a"
            " Hugging Face tokenizer"
        )
    if "model" not in read_json(path):
        raise ConfigError(
            f"{path}: no key 'model', so this is not a Hugging Face tokenizer; download the file"
            " again"
        )
    settings = read_json(config) if os.path.lexists(config) else {}
    if os.path.lexists(chat_template):
        settings["chat_template"] = _read_template(chat_template)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        _refuse(error, f"{path}: not a Hugging Face tokenizer", "download the file again")
        raise
    # a saved tokenizer.json keeps what its last user set; prompts must be whole, and without
    # padding
    backend.no_truncation()
    backend.no_padding()
    ends = _ends(generation_config)
    tokenizer = Tokenizer(backend, settings, folder, ends, enable_thinking, prompt_format)
    _check_template(tokenizer, chat_template if os.path.lexists(chat_template) else config)
    return tokenizer


def _check_template(tokenizer: Tokenizer, file: Path) -> None:
    """Whether the prompts of two problems differ; a template that refuses them may still take a
    whole chat."""
    try:
        one, other = (tokenizer.render(f"{PROBE}{number}") for number in "12")
    except ConfigError:
        return
    require(
        one != other,
        f"{file}: the chat template writes {shown(one)} for any problem; correct it so that it"
        " writes the user's message",
    )


def _read_template(file: Path) -> str:
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


def _ends(file: Path) -> list[int]:
    """The end tokens of a generation_config.json, which writes one as a number and several as a
    list."""
    keys = read_keys(file) if os.path.lexists(file) else Keys({}, str(file))
    found = keys.content.get("eos_token_id")
    ends = [] if found is None else found if isinstance(found, list) else [found]
    require(
        all(map(is_whole, ends)),
        f"{file}: eos_token_id is {shown(found)}; it must be a whole number or a list of whole"
        " numbers",
    )
    return ends


def _refuse(error: Exception, what: str, remedy: str) -> None:
    """Raises ConfigError for an error of the Rust library, most of which have no class of their
    own; does nothing for another."""
    if type(error) in (Exception, TypeError, ValueError, UnicodeEncodeError):
        raise ConfigError(f"{what} ({' '.join(str(error).split())}); {remedy}") from error


def character_tokenizer(task: str = "add") -> Tokenizer:
    """Return the built-in tokenizer of a generated task: one token a character, and four special
    tokens."""
    characters = PROGRAM_CHARACTERS if task == "programs" else CHARACTERS
    vocabulary = {token: i for i, token in enumerate([*SPECIALS.values(), *characters])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIALS["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS.values()]
    )
    return Tokenizer(
        backend,
        {**SPECIALS, "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        "built-in",
    )
