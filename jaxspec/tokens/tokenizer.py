"""Tokenizers: those of Hugging Face folders, and the small one of the built-in tasks."""

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
from jaxspec.inputs.json_keys import JsonObject, format_value, load_json_object, read_json
from jaxspec.system.files import expand_user_path
from jaxspec.tokens.chat_template import ChatTemplate, read_template, template_from_settings
from jaxspec.tokens.special_tokens import TOKEN_NAMES, find_special_tokens, stop_ids_in_strings
from jaxspec.tokens.stop_strings import StopStrings, build_stop_table, decode_pieces
from jaxspec.tokens.turns import PROBE, TurnFormat, infer_turn_format, require_problem_in_prompt

ARITHMETIC_CHARACTERS = "0123456789+-=,#;?"
"""Characters of generated arithmetic."""
PROGRAM_CHARACTERS = "0123456789+-*=(),: \n`abdeflmnrstux"
"""Characters of generated programs."""
SPECIALS = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("generation_config.json", "config.json"),
)
"""Files that `load_tokenizer` reads."""
_EMPTY_JSON = JsonObject({}, "")


class Tokenizer:
    """A tokenizer with its end tokens, padding token and chat template.

    `settings` is the content of tokenizer_config.json, and `source` names the folder in messages.
    `generation_config` and `model_config` may name more end tokens. `enable_thinking` is passed to
    the template. `prompt_format` is `data.prompt_format`. Raises ConfigError if one is invalid.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        source: str,
        generation_config: JsonObject = _EMPTY_JSON,
        model_config: JsonObject = _EMPTY_JSON,
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
        template, self._specials = template_from_settings(self._settings, source), dict[str, str]()
        self._template = ChatTemplate(template, source) if template else None
        try:
            specials = find_special_tokens(
                backend, self._settings, source, generation_config, model_config, self._closing_text
            )
        except Exception as error:
            _raise_rust_error(
                error, f"{source}/tokenizer.json cannot encode", "download the file again"
            )
            raise
        # `_closing_text` needed the texts before the rest was known.
        self._specials, self.bos_ids, self._folder_stop_ids, pad_id = specials
        self.stop_ids = self._folder_stop_ids
        self.pad_id: int = pad_id if pad_id is not None else self.stop_ids[-1]

    def with_stops(self, strings: Sequence[str], ids: Sequence[int]) -> Tokenizer:
        """Returns this tokenizer with additional end tokens.

        `strings` is the setting `rollout.stop`, of which the special tokens count, and `ids` is
        `rollout.stop_ids`.
        Raises ConfigError if an id is out of range, or a string has a special token and more.
        """
        for stop_id in ids:
            require(
                stop_id < self.size,
                f"rollout.stop_ids has {stop_id}, but the tokenizer {self.source} has"
                f" ids from 0 to {self.size - 1}; correct the id",
            )
        named_ids = stop_ids_in_strings(strings, self._special_ids)
        tokenizer = copy.copy(self)
        tokenizer.stop_ids = tuple(dict.fromkeys([*self._folder_stop_ids, *named_ids, *ids]))
        return tokenizer

    @property
    def _special_ids(self) -> dict[str, int]:
        """Ids of added tokens that `decode` leaves out, by text."""
        added_tokens = self._backend.get_added_tokens_decoder().items()
        return {
            token.content: token_id
            for token_id, token in added_tokens
            if token.special or token_id in self._folder_stop_ids
        }

    @property
    def reads_clock(self) -> bool:
        """Whether the chat template may use the date."""
        return self._template is not None and self._template.reads_clock

    def with_date(self, date: str) -> Tokenizer:
        """Returns this tokenizer with `date` (2026-11-27) for its chat template."""
        tokenizer = copy.copy(self)
        if self._template is not None:
            tokenizer._template = self._template.with_date(date)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Encodes a text. Special tokens written in it are recognized, and none are added."""
        return self._encode_text(text).ids

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Counts each text's tokens on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            failure = f"{self.source}/tokenizer.json cannot encode one of {len(texts)} texts"
            _raise_rust_error(error, failure, "correct the text, or the tokenizer")
            raise
        return [len(encoding) for encoding in encodings]

    @property
    def fingerprint(self) -> str:
        """Digest of all settings that `render_prompt` and `encode` depend on."""
        date = self._template.today if self._template and self._template.reads_clock else ""
        template_settings = self._settings, self.enable_thinking, self._prompt_format, date
        text = f"{self._backend.to_str()}{json.dumps(template_settings, sort_keys=True)}"
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Decodes ids. Drops special tokens and ids without a token (padded embedding rows)."""
        # End tokens may be ordinary tokens, which the library would not skip.
        dropped_ids = {*self.stop_ids, self.pad_id}
        text_ids = [i for i in map(index, ids) if 0 <= i < self.size and i not in dropped_ids]
        return self._backend.decode(text_ids, skip_special_tokens=True)

    def build_stop_table(self, strings: Sequence[str]) -> StopStrings:
        """Builds the table that finds `strings` in decoded text."""
        special_ids = self._special_ids
        excluded_ids = {*self.stop_ids, self.pad_id, *special_ids.values()}
        texts = [string for string in strings if string not in special_ids]  # others are end tokens
        pieces = decode_pieces(self._backend, self.size, excluded_ids) if texts else []
        return build_stop_table(texts, pieces, self.source)

    def render_prompt(
        self,
        problem: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders a problem (a text, or messages of a chat) as a prompt.

        Uses the chat template, with `tools`. Without one, or if `prompt_format` is not "chat", the
        prompt is the begin token and the text. The text may be inserted into a format.
        Raises ConfigError if the template refuses it, or for several messages without a template.
        """
        if self._prompt_format == "chat" and self._template is not None:
            is_text = isinstance(problem, str)
            subject = "a single user message" if is_text else "these messages"
            return self._template.render(subject, **self._chat_args(problem, tools))
        text: Any = problem
        if not isinstance(problem, str):
            require(
                len(problem) == 1,
                f"a chat of {len(problem)} messages needs a chat template, and"
                f" {self._no_template_reason}; give the last message alone",
            )
            text = problem[0]["content"]
        if self._prompt_format not in ("chat", "raw"):
            text = self._prompt_format.replace("{problem}", text)
        # As text, because `encode` recognizes special tokens but adds none.
        bos_text = "".join(map(self._backend.id_to_token, self.bos_ids))  # pyright: ignore
        return bos_text + text

    def render_prompts(self, requests: Sequence[tuple[Any, Any]]) -> list[str]:
        """Renders problems and tools as `render_prompt` does, but faster."""
        if self._prompt_format == "chat" and self._template is not None:
            # One request to the process of the template, instead of one for each prompt.
            variables = [self._chat_args(problem, tools) for problem, tools in requests]
            return self._template.render_batch("one of these problems", variables)
        return [self.render_prompt(problem, tools) for problem, tools in requests]

    def _chat_args(self, problem: str | Sequence[Mapping[str, Any]], tools: Any) -> dict[str, Any]:
        """Returns the chat template's variables for a problem."""
        is_text = isinstance(problem, str)
        messages = [{"role": "user", "content": problem}] if is_text else list(problem)
        return self._template_args(messages, tools=tools, add_generation_prompt=True)

    @property
    def _no_template_reason(self) -> str:
        if self._template is None:
            return f"{self.source} has none"
        return f"data.prompt_format is {format_value(self._prompt_format)}"

    def encode_prompt(self, problem: str) -> list[int]:
        """Encodes the prompt of a problem."""
        return self.encode(self.render_prompt(problem))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Encodes a whole chat, and marks the assistant's tokens.

        These are its text, the end of its turn, and the end of that line. Text of the generation
        prompt is not marked. `messages` and `tools` are passed to the template, which reads role
        and content, and perhaps tool_calls and reasoning_content. Special tokens are recognized.
        Raises ConfigError if there is no template, or not one turn for each assistant message.
        """
        if self._template is None:
            raise ConfigError(
                f"{self.source}: there is no chat template for messages; add chat_template to"
                " tokenizer_config.json"
            )
        text = self.render_chat(messages, tools)
        spans = self._turn_format.find_spans(text)
        turn_count = sum(message.get("role") == "assistant" for message in messages)
        if len(spans) != turn_count:
            raise ConfigError(
                f"{self.source}: the chat template writes {len(spans)} turns of the assistant for"
                f" {turn_count} messages; every one must be written with"
                f" {format_value(self._turn_format.header)} before and"
                f" {format_value(self._turn_format.closing)} after it, and no message may hold"
                " these"
            )
        encoding = self._encode_text(text)
        # `offsets` has the start and stop of each token in the text.
        is_assistant = [
            any(begin <= offset < stop for begin, stop in spans) for offset, _ in encoding.offsets
        ]
        return encoding.ids, is_assistant

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """Renders a whole chat. There must be a chat template."""
        assert self._template is not None, "only asked for where there is one"
        variables = {"tools": tools, "add_generation_prompt": False}
        return self._fill_template(self._template, messages, "these messages", **variables)

    def unknown_characters(self, text: str) -> str:
        """Returns the distinct characters of `text` that the vocabulary lacks."""
        unk_id = self._backend.token_to_id(self._specials["unk_token"])
        if unk_id is None or unk_id not in self.encode(text):
            return ""
        return "".join(c for c in dict.fromkeys(text) if unk_id in self.encode(c))

    def check_vocab(self, vocab: int, checkpoint: str = "") -> None:
        """Raises ConfigError if the `vocab` rows of a model or `checkpoint` are too few."""
        key, remedy = "model.vocab", f"set --model.vocab {self.size} or more"
        if checkpoint:
            key = f"vocab_size in {checkpoint}/config.json"
            resize_call = f"resize_token_embeddings({self.size}), then save_pretrained"
            remedy = f"give a checkpoint with more rows (transformers: {resize_call})"
            if Path(self.source) != Path(checkpoint):
                remedy = (
                    f"leave out --data.tokenizer, so that the checkpoint's is used, or {remedy}"
                )
        # More rows than tokens are fine: checkpoints often pad them.
        require(
            self.size <= vocab,
            f"{key} is {vocab}, but the tokenizer {self.source} has {self.size} tokens; {remedy}",
        )

    def save(self, folder: str) -> None:
        """Writes tokenizer.json and tokenizer_config.json to `folder`, and creates it."""
        directory = Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps(self._settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def _encode_text(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except Exception as error:
            failure = f"{self.source}/tokenizer.json cannot encode {format_value(text)}"
            _raise_rust_error(error, failure, "correct the text, or the tokenizer")
            raise

    def _fill_template(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], kind: str, **extra: Any
    ) -> str:
        return template.render(kind, **self._template_args(messages, **extra))

    def _template_args(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
        """Returns all variables of a chat template."""
        thinking = {"enable_thinking": self.enable_thinking}
        return {"messages": messages, **thinking, **extra, **self._specials}

    @cached_property
    def _turn_format(self) -> TurnFormat:
        assert self._template is not None, "only asked for where there is one"
        return infer_turn_format(partial(self._fill_template, self._template), self.source)

    def _closing_text(self, token_texts: dict[str, str]) -> str:
        """Returns the template's text after an answer, or "" if it is absent or refuses a chat."""
        if self._template is None:
            return ""
        self._specials = token_texts
        chat = [{"role": role, "content": PROBE} for role in ("user", "assistant")]
        try:
            text = self._fill_template(self._template, chat, "a chat", add_generation_prompt=False)
        except ConfigError:
            return ""
        return text.rpartition(PROBE)[2]


def load_tokenizer(
    folder: str, enable_thinking: bool = True, prompt_format: str = "chat"
) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder. The other arguments are as in `Tokenizer`.

    Reads tokenizer.json, and the others of `TOKENIZER_FILES` if they exist.
    Raises ConfigError if a file is missing, damaged or not valid.
    """
    tokenizer_file, config_file, token_map_file, template_file, generation_file, model_file = (
        expand_user_path(folder, "data.tokenizer") / name for name in TOKENIZER_FILES
    )
    if not tokenizer_file.is_file():
        raise ConfigError(
            f"data.tokenizer is {folder!r}, but there is no file {tokenizer_file}; give the folder"
            " of a Hugging Face tokenizer"
        )
    if "model" not in read_json(tokenizer_file):
        raise ConfigError(
            f"{tokenizer_file}: no key 'model', so this is not a Hugging Face tokenizer; download"
            " the file again"
        )
    settings = dict(_optional_json(config_file).content)
    if "added_tokens_decoder" not in settings:  # as in transformers
        settings |= {
            name: token
            for name, token in _optional_json(token_map_file).content.items()
            if name in TOKEN_NAMES
        }
    if os.path.lexists(template_file):
        settings["chat_template"] = read_template(template_file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:
        _raise_rust_error(
            error, f"{tokenizer_file}: not a Hugging Face tokenizer", "download the file again"
        )
        raise
    # tokenizer.json keeps truncation and padding of its last use, which would alter prompts.
    backend.no_truncation()
    backend.no_padding()
    tokenizer = Tokenizer(
        *(backend, settings, folder, _optional_json(generation_file), _optional_json(model_file)),
        *(enable_thinking, prompt_format),
    )
    require_problem_in_prompt(
        tokenizer.render_prompt, template_file if os.path.lexists(template_file) else config_file
    )
    return tokenizer


def _optional_json(file: Path) -> JsonObject:
    """Reads a JSON file, empty if it is absent."""
    return load_json_object(file) if os.path.lexists(file) else JsonObject({}, str(file))


def _raise_rust_error(error: Exception, failure: str, remedy: str) -> None:
    """Raises ConfigError if `error` is of the Rust library."""
    # Most errors of that library have no class of their own.
    if type(error) in (Exception, TypeError, ValueError, UnicodeEncodeError):
        raise ConfigError(f"{failure} ({' '.join(str(error).split())}); {remedy}") from error


def character_tokenizer(task: str = "add") -> Tokenizer:
    """Builds the tokenizer of a built-in task: one token per character, and four special ones."""
    # Each task has its own characters, so that additions to one keep the ids of the other.
    characters = PROGRAM_CHARACTERS if task == "programs" else ARITHMETIC_CHARACTERS
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
