"""Options of `bench gpu`: sections, and sizes of model and prompts."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxspec.bench.measure import Budget
from jaxspec.bench.workload import SYNTHETIC_LENGTH, GroupSize, PromptLength
from jaxspec.config.check import require_countable
from jaxspec.config.presets import QWEN3_1_7B, QWEN3_8B, spec_without_checkpoint
from jaxspec.config.settings import DraftLength, Seed
from jaxspec.inputs.checked import CheckedConfig, Range, require
from jaxspec.inputs.spec import Count, LayerCount, ModelConfig, ModelSpec, Natural

SECTION_TITLES = {
    0: "the card: versions, memory, load, bandwidth, products",
    1: "right? kernels, layouts, command buffers, loaded programs",
    2: "rounds of the draft length beside plain steps, by rows",
    3: "other draft lengths, the full vocabulary, command buffers",
    4: "answers from prompt to end",
    5: "a GRPO step with and without speculation",
    6: "learning: tokens, operations, memory",
    7: "kernels of three rounds, by time",
}
"""Titles of the sections by number."""
USUAL_SECONDS = {0: 20, 1: 50, 2: 90, 3: 60, 4: 45, 5: 60, 6: 30, 7: 20}
"""Seconds of each section on an H100 with loaded programs."""
# A round keeps one token that the policy draws itself, and at most all drafts.
Acceptance = Annotated[float, Range(min=1, max=SYNTHETIC_LENGTH + 1)]
StepModel = Literal["lora", "full", "1.7b"]

TIMED_SLICES = 3
"""Number of timed slices of rounds."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions(CheckedConfig, prefix="--"):
    """Command-line options of `bench gpu`.

    The defaults here are those of `--size 8b`.
    """

    size: Literal["8b", "tiny"] = "8b"
    """Selects the defaults of the other options. `8b` = Qwen3-8B's shapes, for a GPU, `tiny` =
    seconds on a CPU, to try the command."""
    sections: str = ",".join(map(str, SECTION_TITLES))
    """Section numbers to measure, in this order, separated by commas."""
    out: str = "gpu.json"
    """File to which every section is added. Sections that it has for the same card, versions, code
    and sizes are not measured again."""
    again: bool = False
    """Whether to measure sections again that the file already has."""
    budget: Budget = 540.0
    """Seconds for the whole command. Sections for which no time is left are skipped."""
    programs: str = ""
    """Folder of programs made by --prepare. Missing programs are compiled."""
    prepare: str = ""
    """Folder into which to compile all programs, without measuring. Needs no GPU."""
    hardware: str = ""
    """Card for which --prepare compiles, or `here` for the device of this machine."""
    workers: Natural = 0
    """Number of programs compiled at once. 0 = half the cores, at most 8."""
    layers: LayerCount = 36
    """Number of decoder layers."""
    embed: Count = 4096
    """Width of the residual stream."""
    heads: Count = 32
    """Number of query heads."""
    kv_heads: Count = 8
    """Number of key and value heads."""
    head_size: Count = 128
    """Size of one head."""
    ffn: Count = 12_288
    """Width of the feed-forward layer."""
    vocab: Count = 151_936
    """Size of the vocabulary. The head is not tied to the embedding."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of weights, keys and values. GPU kernels need bfloat16."""
    draft_vocab: Natural = 32_000
    """Size of the EAGLE-3 draft's own vocabulary. 0 = the policy's."""
    page_size: Natural = 64
    """Positions per page of keys and values. 0 = contiguous caches, which have no GPU kernel."""
    rows: tuple[Count, ...] = (1, 8, 32, 64, 128)
    """Numbers of rows generated at once in section 2."""
    few: tuple[Count, ...] = (8, 64)
    """Numbers of rows of section 3. Sections 4 and 7 use the last one."""
    prompt: PromptLength = 1024
    """Tokens per prompt."""
    new: Count = 384
    """Tokens per answer in sections 2, 3 and 7."""
    answer: Count = 1024
    """Tokens per answer in section 4."""
    draft_length: DraftLength = 3
    """Draft tokens per round (K)."""
    other_lengths: tuple[DraftLength, ...] = (1, 5, 7)
    """Draft lengths of section 3."""
    acceptance: Acceptance = 3.3
    """Prescribed mean number of tokens that a round of 3 drafts keeps. Other draft lengths accept
    each draft with the same probability."""
    right_layers: LayerCount = 4
    """Number of layers of the model of section 1."""
    step_model: StepModel = "lora"
    """Policy and trained weights of sections 5 and 6. `lora` = LoRA of rank 16 on the sizes above,
    `full` = all their weights, `1.7b` = all weights of Qwen3-1.7B."""
    step_prompts: Count = 4
    """Prompts per step."""
    group: GroupSize = 8
    """Answers per prompt (G)."""
    step_prompt: PromptLength = 256
    """Tokens per prompt of a step."""
    step_new: Count = 1024
    """Tokens per answer of a step."""
    seed: Seed = 0
    """Seed of weights, prompts and sampling."""

    def check(self) -> None:
        require(
            # `main` refuses an empty list, with a message of its own.
            bool(self.section_numbers) or not self.sections,
            f"--sections is {self.sections!r}; give numbers from {min(SECTION_TITLES)} to"
            f" {max(SECTION_TITLES)} separated by commas, such as 0,1,2",
        )
        require(
            not (self.prepare and self.programs),
            "--prepare makes a folder of programs and --programs uses one; give only one of them",
        )
        require(
            bool(self.prepare) == bool(self.hardware),
            "--prepare FOLDER needs --hardware NAME, the card that programs are compiled for, and"
            " --hardware needs --prepare; give both or neither",
        )
        require(
            bool(self.rows and self.few),
            f"--rows is {self.rows} and --few is {self.few}; give each at least one number of rows,"
            " such as 64",
        )
        max_draft_length = max(self.draft_length, *self.other_lengths, 0)
        for names, answer_tokens, rounds in (
            # A warm-up round and at least one round per timed slice must pass before a row ends.
            ("--new", self.new, TIMED_SLICES + 1),
            ("--answer or --step_new", min(self.answer, self.step_new), 2),
        ):
            require(
                # A round keeps all drafts and one more token at most.
                rounds * (max_draft_length + 1) <= answer_tokens,
                f"{names} {answer_tokens} is too short for {rounds} rounds of --draft_length or"
                f" --other_lengths {max_draft_length}; make it at least"
                f" {rounds * (max_draft_length + 1)}",
            )
        require(
            self.draft_vocab <= self.vocab,
            f"--draft_vocab {self.draft_vocab} is larger than --vocab {self.vocab}; give at most"
            f" {self.vocab}",
        )
        max_rows = max(*self.rows, *self.few, self.step_prompts * self.group)
        tokens = max(self.prompt + max(self.new, self.answer), self.step_prompt + self.step_new)
        require_countable(
            f"--rows, --few or --step_prompts x --group: {max_rows}", max_rows, tokens
        )

    @property
    def section_numbers(self) -> tuple[int, ...]:
        """Section numbers without duplicates, or none if `sections` is invalid."""
        words = [word.strip() for word in self.sections.split(",")]
        are_valid = all(word.isdecimal() and int(word) in SECTION_TITLES for word in words)
        return tuple(dict.fromkeys(map(int, words))) if are_valid else ()

    @property
    def policy(self) -> ModelSpec:
        """Spec of the policy, without a checkpoint."""
        # With the default sizes this is Qwen3-8B.
        names = ("layers", "embed", "heads", "kv_heads", "head_size", "ffn", "vocab")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        config = ModelConfig(
            **sizes, rope_theta=QWEN3_8B.rope_theta, tied=False, dtype=self.dtype, remat=True
        )
        return spec_without_checkpoint(config)

    @property
    def step_policy(self) -> ModelSpec:
        """Spec of the policy of a GRPO step."""
        if self.step_model == "1.7b":
            return spec_without_checkpoint(replace(QWEN3_1_7B, dtype=self.dtype, remat=True))
        return self.policy

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters that a step trains, 0 if it trains all weights."""
        return 16 if self.step_model == "lora" else 0

    @property
    def table_sizes(self) -> dict[str, Any]:
        """Sizes that select the cells of the tables, but change no program."""
        return {name: getattr(self, name) for name in ("rows", "few", "other_lengths")}

    @property
    def program_sizes(self) -> dict[str, Any]:
        """Sizes on which programs of the same name depend."""
        # A folder of programs is refused if one of these differs. `rows`, `few` and `other_lengths`
        # are left out, since the names of programs contain them.
        names = (
            "size layers embed heads kv_heads head_size ffn vocab dtype draft_vocab page_size"
            " prompt new answer draft_length acceptance right_layers step_model step_prompts group"
            " step_prompt step_new seed"
        )
        return {name: getattr(self, name) for name in names.split()}


DEFAULTS = {
    "8b": GpuOptions(),
    "tiny": GpuOptions(
        size="tiny",
        layers=4,
        embed=64,
        heads=4,
        kv_heads=2,
        head_size=16,
        ffn=128,
        vocab=512,
        dtype="float32",
        draft_vocab=128,
        page_size=16,
        rows=(1, 4),
        few=(4,),
        prompt=32,
        new=32,
        answer=32,
        other_lengths=(1,),
        right_layers=4,
        step_prompts=2,
        group=4,
        step_prompt=16,
        step_new=24,
    ),
}
"""Default options by --size."""
