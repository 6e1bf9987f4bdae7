"""Answers prompts on the terminal and shows accepted drafts.

`python -m jaxspec.sample --checkpoint RUN`
"""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
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
(RUN/checkpoints/NUMBER). Without --prompt, prompts are read from standard input, one per line.
Tokens that were drafted and accepted are green and underlined on a terminal, and [in brackets]
elsewhere. The policy itself chose the others. Settings that are not given are the run's. Examples:
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --prompt 27+85=
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --draft.kind none    (plain decoding)
  python -m jaxspec.sample --checkpoint runs/rl_think-tiny --verify coupled    (the same tokens)"""
DRAFTED_STYLE = "green underline"
ENDINGS = {EOS: "eos", LENGTH: "length", FAILED: "failed (logits that are not finite)"}
"""Description of how an answer ended, by status."""


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CheckedConfig, prefix="--"):
    """Options of the command line."""

    prompt: str = ""
    """Prompt to answer. If empty, prompts are read from standard input, one per line."""
    samples: Count = 1
    """Answers to each prompt. Several are generated together, and printed when all are done."""
    seed: Seed = 0
    """Seed of the sampling. The same seed, settings and prompts give the same answers."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0 samples the most likely token."""
    top_k: Natural = 0
    """Sample from the k most likely tokens. 0 allows all."""
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities reach this sum. 1
    allows all."""
    min_p: Annotated[float, Range(min=0, max=1)] = 0.0
    """Sample from tokens with at least this share of the highest probability. 0 allows all."""
    min_new_tokens: Natural = 0
    """Tokens before an end token may be sampled."""
    max_new_tokens: Count = 28
    """Maximum tokens of an answer."""
    banned: tuple[Natural, ...] = ()
    """Token ids that are never sampled."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, at the token that completes one of them."""
    stop_ids: tuple[Natural, ...] = ()
    """Token ids that end an answer, in addition to those in the tokenizer's files."""
    enable_thinking: bool = True
    """Value of `enable_thinking` for the chat template."""
    max_prompt_length: Annotated[int, Range(min=2)] = 8
    """Maximum tokens of a prompt."""
    tokenizer: str = ""
    """Folder of the run's tokenizer, if it has moved since the run."""
    verify: VerifyRule = "block"
    """Lossless rule: `block`, `token`, or `coupled`, which keeps the exact tokens of plain
    decoding."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookup: LookupConfig = field(default_factory=LookupConfig)


ROLLOUT_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "max_new_tokens", "banned"),
    *("stop", "stop_ids", "enable_thinking", "verify", "draft", "lookup"),
)
"""Names of options that are also settings of `rollout`."""


def options_from_config(config: ResolvedConfig) -> SampleOptions:
    """Returns a run's settings as options."""
    return SampleOptions(
        seed=config.seed,
        max_prompt_length=config.data.max_prompt_length,
        tokenizer=config.data.tokenizer,
        **{name: getattr(config.rollout, name) for name in ROLLOUT_OPTIONS},
    )


def sampling_config(
    run: ResolvedConfig, options: SampleOptions, words: Sequence[str]
) -> ResolvedConfig:
    """Returns a run's config for answering one prompt at a time.

    It has the values of `options`, which were parsed from `words`.

    Raises:
      ConfigError: the run has no weights of the draft, a draft setting has no effect, the tokenizer
        is missing, or the answers are too many.
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
    # The config of a learner needs groups of two rows, even though nothing is learned here.
    group_size = max(2, options.samples)
    batch = replace(run.batch, prompts=1, group_size=group_size, mini_batches=1)
    # Answers may be shorter than in training, and a draft cannot unroll beyond a row.
    training = replace(run.draft_training, ttt_steps=min(run.draft_training.ttt_steps, longest - 1))
    return replace(
        run, seed=options.seed, rollout=rollout, data=data, batch=batch, draft_training=training
    )


def _adapt_to_single_row(rollout: RolloutConfig) -> RolloutConfig:
    """Replaces lookups in other rows or earlier answers by lookups in the row itself."""
    # A single row has no siblings, and earlier answers are not stored here.
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
    """Writes a row as its tokens arrive.

    Accepted drafts are green on a terminal, and in brackets elsewhere.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._ids: list[int] = []
        self._shown_length = 0

    def write(self, piece: RoundTokens) -> None:
        """Writes a round, up to the last complete character."""
        # The accepted drafts of a round come before its last token.
        drafted_text = self._decode_next(piece.tokens[: piece.accepted])
        self._print_text(drafted_text, drafted=True)
        self._print_text(self._decode_next(piece.tokens[piece.accepted :]), drafted=False)

    def close(self) -> None:
        """Writes the rest of the row."""
        self._print_text(self._tokenizer.decode(self._ids)[self._shown_length :], drafted=False)
        self._console.print()

    def _decode_next(self, ids: list[int]) -> str:
        # All ids are decoded, since the text of a token may depend on those before it.
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        # A token may end within a character, whose bytes so far decode to replacement characters.
        complete_text = text.rstrip("\N{REPLACEMENT CHARACTER}")
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
    """Answers a prompt and prints the answers.

    A single answer is printed as it is generated. Several answers are printed at the end. A line
    with acceptance, speed and endings follows.
    """
    # Rows are generated at the same time, and would be mixed up on the console.
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
    """Summarizes acceptance, speed and endings in one line."""
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
    """Yields the non-empty lines of standard input."""
    # A pipe is not echoed by a terminal, so its lines are printed with their answers.
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
    """Answers the prompts of the command line or of standard input.

    Returns the exit status, which is 2 if a line of standard input was refused.
    """
    path, words = take_option(argv, COMMAND, "checkpoint", "RUN [--prompt TEXT]")
    prog = f"{COMMAND} --checkpoint {path or 'RUN'}"
    # Without a run, help shows the defaults of this program.
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
        # Options here have no prefix `rollout.`, so the message must name them without it.
        raise ConfigError(re.sub(r"(?<![/\w])rollout\.(?=\w)", "", str(error))) from error
    problems = [encode_prompt(options.prompt, config, job.tokenizer)] if options.prompt else []
    console, start_time = Console(), time.perf_counter()
    weights = restore_weights(run, job.config, job.step, options.samples)
    loaded_run = LoadedRun(job.step, job.tokenizer.pad_id, weights, options.samples)
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
    if problems:
        return 0
    return _answer_lines(console, loaded_run, job.config, job.tokenizer, options.samples)


def _answer_lines(
    console: Console,
    loaded_run: LoadedRun,
    config: ResolvedConfig,
    tokenizer: Tokenizer,
    samples: int,
) -> int:
    """Answers the lines of standard input. Returns the exit status."""
    status = 0
    for text in _read_lines(console):
        try:
            problem = encode_prompt(text, config, tokenizer)
        except ConfigError as error:  # the next line may be valid
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = 2
        else:
            answer_prompt(console, loaded_run, problem, tokenizer, samples)
    return status


if __name__ == "__main__":
    sys.exit(run_without_saving("answering", lambda _: main(sys.argv[1:])))
