"""Text to token ids and back: a Hugging Face tokenizer.json with its chat template, and the small
one of the built-in tasks."""

from __future__ import annotations

import copy
import hashlib
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
from jaxspec.inputs.json_keys import Keys, read_json, read_keys, shown
from jaxspec.system.files import expanded
from jaxspec.tokens.chat_template import ChatTemplate, read_template, template_of
from jaxspec.tokens.special_tokens import NAMES, ends_in_strings, special_tokens
from jaxspec.tokens.stop_strings import StopTable, stop_table, token_bytes
from jaxspec.tokens.turns import PROBE, Turn, require_rendered, turn_of

CHARACTERS = "0123456789+-=,#;?"
"""Of generated arithmetic."""
PROGRAM_CHARACTERS = "0123456789+-*=(),: \n`abdeflmnrstux"
"""Of generated programs, which have their own so that the ids of arithmetic stay as they are."""
SPECIALS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("generation_config.json", "config.json"),
)
"""What `load_tokenizer` reads."""
_NOTHING = Keys({}, "")


class Tokenizer:
    """A tokenizer with its ends, its padding and its chat template; `source` names it in messages.

    `settings` is the content of tokenizer_config.json (chat template included); `generation` and
    `model` are generation_config.json and config.json, which name ends as well; `enable_thinking`
    is handed to the chat template; `prompt_format` is as in the setting `data.prompt_format`.
    Raises `ConfigError` where no end token is known, or one is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        source: str,
        generation: Keys = _NOTHING,
        model: Keys = _NOTHING,
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
        template, self._specials = template_of(self._settings, source), dict[str, str]()
        self._template = ChatTemplate(template, source) if template else None
        try:
            specials = special_tokens(
                backend, self._settings, source, generation, model, self._closing
            )
        except Exception as error:
            _refuse(error, f"{source}/tokenizer.json cannot encode", "download the file again")
            raise
        self._specials, self.bos_ids, self._own_ends, pad = specials
        self.stop_ids = self._own_ends
        self.pad_id: int = pad if pad is not None else self.stop_ids[-1]

    def ending_with(self, strings: Sequence[str], ids: Sequence[int]) -> Tokenizer:
        """Return this tokenizer with the end tokens of its folder and more: `ids`
        (`rollout.stop_ids`), and the special tokens that `strings` (`rollout.stop`) name.

        Raises `ConfigError` where an id is beyond the vocabulary, or a string has a special token
        in it, which no text of a response has.
        """
        for number in ids:
            require(
                number < self.size,
                f"rollout.stop_ids has {number}, and the tokenizer {self.source} has {self.size}"
                " tokens, from 0; correct the id",
            )
        more = ends_in_strings(strings, self._special_ids)
        other = copy.copy(self)
        other.stop_ids = tuple(dict.fromkeys([*self._own_ends, *more, *ids]))
        return other

    @property
    def _special_ids(self) -> dict[str, int]:
        """Added tokens that `decode` leaves out, by their text."""
        added = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: number
            for number, token in added
            if token.special or number in self._own_ends
        }

    @property
    def reads_clock(self) -> bool:
        """Whether the chat template may write the date."""
        return self._template is not None and self._template.reads_clock

    def on_day(self, today: str) -> Tokenizer:
        """Return this tokenizer with a chat template that takes `today` (2026-11-27) for the
        date."""
        other = copy.copy(self)
        if self._template is not None:
            other._template = self._template.on_day(today)
        return other

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens are recognised where they are written out, and
        none are added."""
        return self._encoded(text).ids

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids `encode` gives for each text; many texts share the cores."""
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            what = f"{self.source}/tokenizer.json cannot encode one of {len(texts)} texts"
            _refuse(error, what, "correct the text, or the tokenizer")
            raise
        return [len(encoding) for encoding in found]

    @property
    def fingerprint(self) -> str:
        """A digest of all that `render` and `encode` depend on."""
        day = self._template.today if self._template and self._template.reads_clock else ""
        told = self._settings, self.enable_thinking, self._prompt_format, day
        text = f"{self._backend.to_str()}{json.dumps(told, sort_keys=True)}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of `ids` without special tokens; ids that have no token (padded rows of
        the embedding) are left out."""
        dropped = {*self.stop_ids, self.pad_id}
        kept = [i for i in map(index, ids) if 0 <= i < self.size and i not in dropped]
        return self._backend.decode(kept, skip_special_tokens=True)

    def stop_table(self, strings: Sequence[str]) -> StopTable | None:
        """Return what finds `strings` in the text that `decode` gives: see
        `stop_strings.stop_table`."""
        named = self._special_ids
        left_out = {*self.stop_ids, self.pad_id, *named.values()}
        texts = [string for string in strings if string not in named]  # others are end tokens
        pieces = token_bytes(self._backend, self.size, left_out) if texts else []
        return stop_table(texts, pieces, self.source)

    def render(
        self,
        problem: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return `problem`, a text or the messages of a chat, as a prompt: by the chat template,
        which is given `tools`; or behind the beginning token, where there is none or another format
        is asked for.

        Raises `ConfigError` for several messages without a template.
        """
        if self._prompt_format == "chat" and self._template is not None:
            whole = isinstance(problem, str)
            what = "a single user message" if whole else "these messages"
            return self._template.fill(what, **self._asked(problem, tools))
        text: Any = problem
        if not isinstance(problem, str):
            require(
                len(problem) == 1,
                f"a chat of {len(problem)} messages needs a chat template, and {self._why_none};"
                " give the last message alone",
            )
            text = problem[0]["content"]
        if self._prompt_format not in ("chat", "raw"):
            text = self._prompt_format.replace("{problem}", text)
        begin = "".join(map(self._backend.id_to_token, self.bos_ids))  # pyright: ignore
        return begin + text

    def render_each(self, asked: Sequence[tuple[Any, Any]]) -> list[str]:
        """Return `render` of each of some problems with their tools, which takes less time."""
        if self._prompt_format == "chat" and self._template is not None:
            names = [self._asked(problem, tools) for problem, tools in asked]
            return self._template.fill_each("one of these problems", names)
        return [self.render(problem, tools) for problem, tools in asked]

    def _asked(self, problem: str | Sequence[Mapping[str, Any]], tools: Any) -> dict[str, Any]:
        """The names that a chat template is filled with to ask a problem."""
        text = isinstance(problem, str)
        messages = [{"role": "user", "content": problem}] if text else list(problem)
        return self._names(messages, tools=tools, add_generation_prompt=True)

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
        text = self.render_whole(messages, tools)
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

    def render_whole(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """Return a whole chat as the chat template, which there is, writes it."""
        assert self._template is not None, "only asked for where there is one"
        names = {"tools": tools, "add_generation_prompt": False}
        return self._fill(self._template, messages, "these messages", **names)

    def unknown(self, text: str) -> str:
        """Return the characters of `text` that the vocabulary cannot express, each once."""
        unk = self._backend.token_to_id(self._specials["unk_token"])
        if unk is None or unk not in self.encode(text):
            return ""
        return "".join(c for c in dict.fromkeys(text) if unk in self.encode(c))

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

    def _fill(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], what: str, **names: Any
    ) -> str:
        return template.fill(what, **self._names(messages, **names))

    def _names(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> dict[str, Any]:
        """All that a chat template is given."""
        thinking = {"enable_thinking": self.enable_thinking}
        return {"messages": messages, **thinking, **names, **self._specials}

    @cached_property
    def _turn(self) -> Turn:
        assert self._template is not None, "only asked for where there is one"
        return turn_of(partial(self._fill, self._template), self.source)

    def _closing(self, specials: dict[str, str]) -> str:
        """What the chat template writes after an answer; empty where it refuses a whole chat."""
        if self._template is None:
            return ""
        self._specials = specials
        chat = [{"role": role, "content": PROBE} for role in ("user", "assistant")]
        try:
            text = self._fill(self._template, chat, "a chat", add_generation_prompt=False)
        except ConfigError:
            return ""
        return text.rpartition(PROBE)[2]


def load_tokenizer(
    folder: str, enable_thinking: bool = True, prompt_format: str = "chat"
) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder; `enable_thinking` is handed to its chat
    template, and `prompt_format` is as in the setting `data.prompt_format`.

    Reads tokenizer.json, and those others of `FILES` that are there.
    Raises `ConfigError` for a missing or damaged file and for a tokenizer without an end token.
    """
    path, config, token_map, chat_template, generation, model = (
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
    settings = dict(_keys(config).content)
    if "added_tokens_decoder" not in settings:  # else transformers does not read the map either
        settings |= {name: each for name, each in _keys(token_map).content.items() if name in NAMES}
    if os.path.lexists(chat_template):
        settings["chat_template"] = read_template(chat_template)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        _refuse(error, f"{path}: not a Hugging Face tokenizer", "download the file again")
        raise
    # a saved tokenizer.json keeps what its last user set; prompts must be whole, and without
    # padding
    backend.no_truncation()
    backend.no_padding()
    tokenizer = Tokenizer(
        *(backend, settings, folder, _keys(generation), _keys(model)),
        *(enable_thinking, prompt_format),
    )
    require_rendered(tokenizer.render, chat_template if os.path.lexists(chat_template) else config)
    return tokenizer


def _keys(file: Path) -> Keys:
    """The keys of a file; none where it is absent."""
    return read_keys(file) if os.path.lexists(file) else Keys({}, str(file))


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
