"""Answers on the terminal, token by token, with the run's draft at work: `python -m jaxspec.sample
--checkpoint RUN`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import begin

    begin()

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from rich.console import Console
from rich.text import Text

from jaxspec.config.check import require_countable
from jaxspec.config.cli import override, settle, take_option
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
from jaxspec.drafts.kinds import kind_of
from jaxspec.host.job import at_once
from jaxspec.host.loaded_run import (
    Answer,
    LoadedRun,
    Piece,
    check_tokenizer,
    check_weights,
    find_run,
    open_here,
    read_prompt,
    restore,
)
from jaxspec.inputs.checked import Checked, ConfigError, Range, require
from jaxspec.inputs.spec import Count, Natural
from jaxspec.state import EOS, FAILED, LENGTH
from jaxspec.system.progress import short
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
DRAFTED = "green underline"
ENDINGS = {EOS: "eos", LENGTH: "length", FAILED: "failed (logits that are not finite)"}
"""How an answer ended, in words."""


@dataclass(frozen=True, kw_only=True)
class Options(Checked, prefix="--"):
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
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum; 1:
    from all."""
    min_p: Annotated[float, Range(least=0, most=1)] = 0.0
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
    max_prompt_length: Annotated[int, Range(least=2)] = 8
    """Longest prompt, in tokens."""
    tokenizer: str = ""
    """Folder of the run's tokenizer, if it is not where the run was told."""
    verify: VerifyRule = "block"
    """Lossless rule: `block`, `token`, or `coupled`, which gives the very tokens of plain
    decoding."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)


SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "max_new_tokens", "banned"),
    *("stop", "stop_ids", "enable_thinking", "verify", "draft", "lookup"),
)
"""Options that are settings of `rollout`."""


def options_of(config: ResolvedConfig) -> Options:
    """The run's own settings."""
    return Options(
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        tokenizer=config.data.tokenizer,
        **{name: getattr(config.rollout, name) for name in SAMPLING},
    )


def sampling_config(run: ResolvedConfig, options: Options, words: Sequence[str]) -> ResolvedConfig:
    """The run's config with the options in it, which come from `words`, for one prompt.

    Raises:
      ConfigError: a learned draft that the run has no weights for, draft settings without use, or
        no tokenizer.
    """
    rollout = replace(run.rollout, **{name: getattr(options, name) for name in SAMPLING})
    longest = options.max_prompt_length + options.max_new_tokens
    require_countable(f"--samples {options.samples}:", options.samples, longest)
    rollout = settle(replace(run, rollout=rollout), words, under="rollout.").rollout
    check_weights(run.rollout.draft, rollout.draft)
    check_tokenizer(run.data.tokenizer, options.tokenizer)
    data = replace(
        run.data, max_prompt_length=options.max_prompt_length, tokenizer=options.tokenizer
    )
    # one row is no group to learn from
    group = max(2, options.samples)
    batch = replace(run.batch, prompts=1, group_size=group, mini_batches=1)
    training = replace(
        run.draft_training, ttt_steps=min(run.draft_training.ttt_steps, longest - 1)
    )  # answers may be shorter than in training
    return replace(
        run, seed=options.seed, rollout=rollout, data=data, batch=batch, draft_training=training
    )


def _alone(rollout: RolloutConfig) -> RolloutConfig:
    """For a single row: without siblings and earlier answers, history is the latest n-gram
    match."""
    alone = kind_of(rollout.lookup_kind).alone
    if not alone:
        return rollout
    lookup, draft = replace(rollout.lookup, rule="latest"), rollout.draft
    if draft.learned:
        return replace(rollout, lookup=replace(lookup, beside=alone))
    return replace(rollout, lookup=replace(lookup, beside="none"), draft=replace(draft, kind=alone))


class Writer:
    """Writes a row as its tokens come: what was drafted and accepted is green on a terminal, and in
    brackets elsewhere."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def write(self, piece: Piece) -> None:
        """Shows what a round gave, up to the last whole character: a token may end in the middle of
        one."""
        drafted = self._next(piece.tokens[: piece.accepted])
        self._show(drafted, drafted=True)
        self._show(self._next(piece.tokens[piece.accepted :]), drafted=False)

    def close(self) -> None:
        """Shows what is left and ends the line."""
        self._show(self._tokenizer.decode(self._ids)[self._shown :], drafted=False)
        self._console.print()

    def _next(self, ids: list[int]) -> str:
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes that are no character yet
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        return new

    def _show(self, text: str, *, drafted: bool) -> None:
        if not text:
            return
        if self._console.is_terminal:
            self._console.print(
                Text(text, style=DRAFTED if drafted else ""), end="", soft_wrap=True
            )
        else:
            self._console.out(f"[{text}]" if drafted else text, end="", highlight=False)


def show(
    console: Console, loaded: LoadedRun, problem: Problem, tokenizer: Tokenizer, samples: int
) -> None:
    """Answers a prompt and says what speculation did: a single row as it comes, several one after
    another."""
    writers = [Writer(console, tokenizer) for _ in range(samples)]
    pieces: list[list[Piece]] = [[] for _ in range(samples)]
    for given in loaded.rounds(problem):
        if isinstance(given, Answer):
            for number, (writer, row, status) in enumerate(
                zip(writers, pieces, given.status, strict=True), start=1
            ):
                if samples > 1:
                    _line(console, f"-- {number} of {samples}: {ENDINGS[status]}")
                for piece in row:
                    writer.write(piece)
                writer.close()
            _line(console, summary(given))
        elif samples == 1:
            writers[0].write(given[0])
        else:
            for row, piece in zip(pieces, given, strict=True):
                row.append(piece)


def summary(answer: Answer) -> str:
    """Acceptance, speed and ending of an answer, in one line."""
    metrics, tokens = answer.metrics, answer.metrics["rollout/tokens"]
    length, kept = metrics["rollout/acceptance_length"], metrics["rollout/tokens_per_target_pass"]
    ending = ", ".join(
        f"{ENDINGS[code]}{f' x {count}' if count > 1 else ''}"
        for code in ENDINGS
        if (count := answer.status.count(code))
    )
    rate = (
        f"{short(tokens / answer.seconds)} tokens/s ({tokens:.0f} tokens in {answer.seconds:.2f} s)"
    )
    return (
        f"-- acceptance_length {length:.2f}, {kept:.2f} tokens a target pass, {rate}, ended by"
        f" {ending}"
    )


def _line(console: Console, text: str) -> None:
    console.print(Text(text, style="dim" if console.is_terminal else ""), soft_wrap=True)


def _legend(console: Console, rollout: RolloutConfig) -> None:
    if not rollout.draft.drafts:
        _line(console, "plain decoding: the policy chooses every token")
    elif console.is_terminal:
        console.print(
            Text.assemble(
                ("green and underlined", DRAFTED),
                (": drafted and accepted; plain: chosen by the policy", "dim"),
            )
        )
    else:
        _line(console, "[in brackets]: drafted and accepted; the rest: chosen by the policy")


def _asked(console: Console) -> Iterator[str]:
    """Lines of standard input until it ends; empty ones are passed over, and those of a pipe are
    repeated in the output."""
    typed = sys.stdin.isatty()
    while True:
        if typed:
            console.print("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            if not typed:
                _line(console, f"> {line.rstrip()}")
            yield line.rstrip("\r\n")


def main(argv: Sequence[str]) -> int:
    """Answers what the command line or standard input asks; returns the exit status, 2 if a prompt
    was refused."""
    path, words = take_option(argv, COMMAND, "checkpoint", "RUN [--prompt TEXT]")
    prog = f"{COMMAND} --checkpoint {path or 'RUN'}"
    if not path and {"-h", "--help"} & set(words):
        override(Options(), words, prog, ABOUT)
    require(
        bool(path),
        "no --checkpoint: give a training run's folder, such as --checkpoint runs/rl_think-tiny;"
        f" see {COMMAND} --help",
    )
    run = find_run(path)
    try:
        options = override(options_of(run.config), words, prog, ABOUT)
        config = sampling_config(run.config, options, words)
        job = open_here(
            config if options.samples > 1 else replace(config, rollout=_alone(config.rollout))
        )
    except ConfigError as error:
        # the options here go without
        raise ConfigError(re.sub(r"(?<![/\w])rollout\.(?=\w)", "", str(error))) from error
    only = [read_prompt(options.prompt, config, job.tokenizer)] if options.prompt else []
    console, began = Console(), time.perf_counter()
    loaded = LoadedRun(job, restore(run, job, options.samples), options.samples)
    rollout = config.rollout
    kind = rollout.draft.kind
    kind = (
        "no draft"
        if not rollout.draft.drafts
        else f"{kind} draft, K={rollout.draft.max_draft_length}, {rollout.verify} rule"
    )
    made = (
        f"{kind}, temperature {rollout.temperature:g}; ready in {time.perf_counter() - began:.1f} s"
    )
    _line(console, f"checkpoint {run.number} of {run.folder}: {made}")
    _legend(console, rollout)
    for problem in only:
        show(console, loaded, problem, job.tokenizer, options.samples)
    return 0 if only else _answer_lines(console, loaded, options.samples)


def _answer_lines(console: Console, loaded: LoadedRun, samples: int) -> int:
    status = 0
    for text in _asked(console):
        try:
            problem = read_prompt(text, loaded.job.config, loaded.job.tokenizer)
        except ConfigError as error:  # the next line may be good
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 2
        else:
            show(console, loaded, problem, loaded.job.tokenizer, samples)
    return status


if __name__ == "__main__":
    sys.exit(at_once("answering", lambda _: main(sys.argv[1:])))
