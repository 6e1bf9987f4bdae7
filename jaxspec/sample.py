"""Answers on the terminal, token by token, with the run's draft at work: `python -m jaxspec.sample
--checkpoint RUN`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from rich.console import Console
from rich.text import Text

from jaxspec.config.check import require_countable
from jaxspec.config.cli import override_settings, settle_draft_settings, take_option
from jaxspec.config.settings import (
    DraftConfig,
    LookupConfig,
    ResolvedConfig,
    RolloutConfig,
    Seed,
    Temperature,
    VerifyRule,
)
from jaxspec.data.problem_source import Problem
from jaxspec.drafts.kinds import get_kind
from jaxspec.host.job import run_without_saving
from jaxspec.host.loaded_run import (
    LoadedRun,
    PromptAnswer,
    RoundTokens,
    check_draft_weights,
    check_tokenizer,
    encode_prompt,
    find_run,
    open_single_shard,
    restore_weights,
)
from jaxspec.inputs.checked import CheckedConfig, ConfigError, Range, require
from jaxspec.inputs.spec import Count, Natural
from jaxspec.state import EOS, FAILED, LENGTH
from jaxspec.system.progress import format_number
from jaxspec.tokens.tokenizer import Tokenizer

COMMAND = "python -m jaxspec.sample"
ABOUT = """Answers prompts with the newest checkpoint of a training run, and shows which tokens the
draft proposed.

RUN is a run's folder (with config.json and checkpoints/), or one checkpoint in it
(RUN/checkpoints/NUMBER). Without --prompt, prompts are read from standard input, one a line. Tokens
that were drafted and accepted are green and underlined on a terminal and stand [in brackets]
elsewhere; the others were chosen by the policy itself. Settings that are not named are the run's.
Examples:
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --prompt 27+85=
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --draft.kind none    (plain decoding)
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --verify coupled    (the same tokens)"""
DRAFTED_STYLE = "green underline"
ENDINGS = {EOS: "eos", LENGTH: "length", FAILED: "failed (logits that are not finite)"}
"""How an answer ended, in words."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CheckedConfig, prefix="--"):
    """What the command line may change."""

    prompt: str = ""
    """The prompt; empty: prompts come from standard input, one a line."""
    samples: Count = 1
    """Answers to each prompt; several are made together, and printed when all are done."""
    seed: Seed = 0
    """Seed of the sampling; the same seed, settings and prompts give the same answers."""
    temperature: Temperature = 1.0
    """Sampling temperature; 0: the most likely token."""
    top_k: Natural = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum; 1:
    from all."""
    min_p: Annotated[float, Range(min=0, max=1)] = 0.0
    """Sample from tokens at least this share as likely as the most likely one; 0: from all."""
    min_new_tokens: Natural = 0
    """Tokens before an end token may be sampled."""
    max_new_tokens: Count = 28
    """Longest answer, in tokens."""
    banned: tuple[Natural, ...] = ()
    """Token ids that are never sampled."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, with the token in which it first contains one of them."""
    stop_ids: tuple[Natural, ...] = ()
    """Token ids that end an answer, beside those that the tokenizer's files name."""
    enable_thinking: bool = True
    """What the chat template is told of `enable_thinking`."""
    max_prompt_length: Annotated[int, Range(min=2)] = 8
    """Longest prompt, in tokens."""
    tokenizer: str = ""
    """Folder of the run's tokenizer, if it is not where the run was told."""
    verify: VerifyRule = "block"
    """Lossless rule: `block`, `token`, or `coupled`, which gives the very tokens of plain
    decoding."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)


ROLLOUT_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "max_new_tokens", "banned"),
    *("stop", "stop_ids", "enable_thinking", "verify", "draft", "lookup"),
)
"""Options that are settings of `rollout`."""


def options_from_config(config: ResolvedConfig) -> SampleOptions:
    """The run's own settings."""
    return SampleOptions(
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        tokenizer=config.data.tokenizer,
        **{name: getattr(config.rollout, name) for name in ROLLOUT_OPTIONS},
    )


def sampling_config(
    run: ResolvedConfig, options: SampleOptions, words: Sequence[str]
) -> ResolvedConfig:
    """The run's config with the options in it, which come from `words`, for one prompt.

    Raises:
      ConfigError: a learned draft that the run has no weights for, draft settings without use, or
        no tokenizer.
    """
    rollout = replace(run.rollout, **{name: getattr(options, name) for name in ROLLOUT_OPTIONS})
    longest = options.max_prompt_length + options.max_new_tokens
    require_countable(f"--samples {options.samples}:", options.samples, longest)
    rollout = settle_draft_settings(replace(run, rollout=rollout), words, prefix="rollout.").rollout
    check_draft_weights(run.rollout.draft, rollout.draft)
    check_tokenizer(run.data.tokenizer, options.tokenizer)
    data = replace(
        run.data, max_prompt_length=options.max_prompt_length, tokenizer=options.tokenizer
    )
    # one row is no group to learn from
    group_size = max(2, options.samples)
    batch = replace(run.batch, prompts=1, group_size=group_size, mini_batches=1)
    training = replace(
        run.draft_training, ttt_steps=min(run.draft_training.ttt_steps, longest - 1)
    )  # answers may be shorter than in training
    return replace(
        run, seed=options.seed, rollout=rollout, data=data, batch=batch, draft_training=training
    )


def _adapt_to_single_row(rollout: RolloutConfig) -> RolloutConfig:
    """For a single row: without siblings and earlier answers, history is the latest n-gram
    match."""
    lookup_kind = get_kind(rollout.lookup_kind).single_row_kind
    if not lookup_kind:
        return rollout
    lookup, draft = replace(rollout.lookup, rule="latest"), rollout.draft
    if draft.is_learned:
        return replace(rollout, lookup=replace(lookup, beside=lookup_kind))
    return replace(
        rollout, lookup=replace(lookup, beside="none"), draft=replace(draft, kind=lookup_kind)
    )


class RowWriter:
    """Writes a row as its tokens come: what was drafted and accepted is green on a terminal, and in
    brackets elsewhere."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._ids: list[int] = []
        self._shown_length = 0

    def write(self, piece: RoundTokens) -> None:
        """Shows what a round gave, up to the last whole character: a token may end in the middle of
        one."""
        drafted_text = self._decode_next(piece.tokens[: piece.accepted])
        self._print_text(drafted_text, drafted=True)
        self._print_text(self._decode_next(piece.tokens[piece.accepted :]), drafted=False)

    def close(self) -> None:
        """Shows what is left and ends the line."""
        self._print_text(self._tokenizer.decode(self._ids)[self._shown_length :], drafted=False)
        self._console.print()

    def _decode_next(self, ids: list[int]) -> str:
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        complete_text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes that are no character yet
        new_text = complete_text[self._shown_length :]
        self._shown_length = max(self._shown_length, len(complete_text))
        return new_text

    def _print_text(self, text: str, *, drafted: bool) -> None:
        if not text:
            return
        if self._console.is_terminal:
            self._console.print(
                Text(text, style=DRAFTED_STYLE if drafted else ""), end="", soft_wrap=True
            )
        else:
            self._console.out(f"[{text}]" if drafted else text, end="", highlight=False)


def answer_prompt(
    console: Console, loaded_run: LoadedRun, problem: Problem, tokenizer: Tokenizer, samples: int
) -> None:
    """Answers a prompt and says what speculation did: a single row as it comes, several one after
    another."""
    writers = [RowWriter(console, tokenizer) for _ in range(samples)]
    pieces: list[list[RoundTokens]] = [[] for _ in range(samples)]
    for result in loaded_run.generate_rounds(problem):
        if isinstance(result, PromptAnswer):
            for number, (writer, row, status) in enumerate(
                zip(writers, pieces, result.status, strict=True), start=1
            ):
                if samples > 1:
                    _print_line(console, f"-- {number} of {samples}: {ENDINGS[status]}")
                for piece in row:
                    writer.write(piece)
                writer.close()
            _print_line(console, summarize_answer(result))
        elif samples == 1:
            writers[0].write(result[0])
        else:
            for row, piece in zip(pieces, result, strict=True):
                row.append(piece)


def summarize_answer(answer: PromptAnswer) -> str:
    """Acceptance, speed and ending of an answer, in one line."""
    metrics, tokens = answer.metrics, answer.metrics["rollout/tokens"]
    length, tokens_per_pass = (
        metrics["rollout/acceptance_length"],
        metrics["rollout/tokens_per_target_pass"],
    )
    ending = ", ".join(
        f"{ENDINGS[status]}{f' x {count}' if count > 1 else ''}"
        for status in ENDINGS
        if (count := answer.status.count(status))
    )
    rate = (
        f"{format_number(tokens / answer.seconds)} tokens/s ({tokens:.0f} tokens in"
        f" {answer.seconds:.2f} s)"
    )
    return (
        f"-- acceptance_length {length:.2f}, {tokens_per_pass:.2f} tokens a target pass, {rate},"
        f" ended by {ending}"
    )


def _print_line(console: Console, text: str) -> None:
    console.print(Text(text, style="dim" if console.is_terminal else ""), soft_wrap=True)


def _print_legend(console: Console, rollout: RolloutConfig) -> None:
    if not rollout.draft.is_enabled:
        _print_line(console, "plain decoding: the policy chooses every token")
    elif console.is_terminal:
        console.print(
            Text.assemble(
                ("green and underlined", DRAFTED_STYLE),
                (": drafted and accepted; plain: chosen by the policy", "dim"),
            )
        )
    else:
        _print_line(console, "[in brackets]: drafted and accepted; the rest: chosen by the policy")


def _read_lines(console: Console) -> Iterator[str]:
    """Lines of standard input until it ends; empty ones are passed over, and those of a pipe are
    repeated in the output."""
    is_interactive = sys.stdin.isatty()
    while True:
        if is_interactive:
            console.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            if not is_interactive:
                _print_line(console, f"> {line.rstrip()}")
            yield line.rstrip("\r\n")


def main(argv: Sequence[str]) -> int:
    """Answers what the command line or standard input asks; returns the exit status, 2 if a prompt
    was refused."""
    path, words = take_option(argv, COMMAND, "checkpoint", "RUN [--prompt TEXT]")
    prog = f"{COMMAND} --checkpoint {path or 'RUN'}"
    if not path and {"-h", "--help"} & set(words):
        override_settings(SampleOptions(), words, prog, ABOUT)
    require(
        bool(path),
        "no --checkpoint: give a training run's folder, such as --checkpoint runs/rl_think-tiny;"
        f" see {COMMAND} --help",
    )
    run = find_run(path)
    try:
        options = override_settings(options_from_config(run.config), words, prog, ABOUT)
        config = sampling_config(run.config, options, words)
        job = open_single_shard(
            config
            if options.samples > 1
            else replace(config, rollout=_adapt_to_single_row(config.rollout))
        )
    except ConfigError as error:
        # the options here go without
        raise ConfigError(re.sub(r"(?<![/\w])rollout\.(?=\w)", "", str(error))) from error
    problems = [encode_prompt(options.prompt, config, job.tokenizer)] if options.prompt else []
    console, start_time = Console(), time.perf_counter()
    loaded_run = LoadedRun(job, restore_weights(run, job, options.samples), options.samples)
    rollout = config.rollout
    kind = rollout.draft.kind
    kind = (
        "no draft"
        if not rollout.draft.is_enabled
        else f"{kind} draft, K={rollout.draft.max_draft_length}, {rollout.verify} rule"
    )
    description = (
        f"{kind}, temperature {rollout.temperature:g}; ready in"
        f" {time.perf_counter() - start_time:.1f} s"
    )
    _print_line(console, f"checkpoint {run.number} of {run.folder}: {description}")
    _print_legend(console, rollout)
    for problem in problems:
        answer_prompt(console, loaded_run, problem, job.tokenizer, options.samples)
    return 0 if problems else _answer_lines(console, loaded_run, options.samples)


def _answer_lines(console: Console, loaded_run: LoadedRun, samples: int) -> int:
    status = 0
    for text in _read_lines(console):
        try:
            problem = encode_prompt(text, loaded_run.job.config, loaded_run.job.tokenizer)
        except ConfigError as error:  # the next line may be good
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 2
        else:
            answer_prompt(console, loaded_run, problem, loaded_run.job.tokenizer, samples)
    return status


if __name__ == "__main__":
    sys.exit(run_without_saving("answering", lambda _: main(sys.argv[1:])))
