"""Options of `bench gpu`: what to measure, and the sizes of model and prompts."""

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
USUAL_SECONDS = {0: 20, 1: 50, 2: 90, 3: 60, 4: 45, 5: 60, 6: 30, 7: 20}
"""Of each section on an H100, its programs loaded."""
Acceptance = Annotated[float, Range(min=1, max=SYNTHETIC_LENGTH + 1)]
StepModel = Literal["lora", "full", "1.7b"]


TIMED_SLICES = 3
"""Timed slices of rounds."""


@dataclass(frozen=True, kw_only=True)
class GpuOptions(CheckedConfig, prefix="--"):
    """What `bench gpu` measures; the defaults are those of --size."""

    size: Literal["8b", "tiny"] = "8b"
    """`8b`: Qwen3-8B's shapes, for a GPU. `tiny`: seconds on a CPU, to try the command."""
    sections: str = ",".join(map(str, SECTION_TITLES))
    """Sections to measure, in this order."""
    out: str = "gpu.json"
    """File that every section is added to. What it has for the same card, versions and sizes is not
    measured again."""
    again: bool = False
    """Measure sections that the file has, too."""
    budget: Budget = 540.0
    """Seconds for everything; sections that would come later are left out."""
    programs: str = ""
    """Folder of programs that --prepare made; others are compiled."""
    prepare: str = ""
    """Compile all programs into this folder and measure nothing; needs no GPU."""
    hardware: str = ""
    """Card that --prepare compiles for, or `here` for the device of this machine."""
    workers: Natural = 0
    """Programs compiled at once; 0: half the cores, at most 8."""
    layers: LayerCount = 36
    """Decoder layers."""
    embed: Count = 4096
    """Width of the residual stream."""
    heads: Count = 32
    """Query heads."""
    kv_heads: Count = 8
    """Key and value heads."""
    head_size: Count = 128
    """Size of one head."""
    ffn: Count = 12_288
    """Width of the feed-forward layer."""
    vocab: Count = 151_936
    """Tokens of the vocabulary; the head is untied."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights, keys and values; GPU kernels are for bfloat16."""
    draft_vocab: Natural = 32_000
    """Tokens of the EAGLE-3 draft's own vocabulary; 0: the policy's."""
    page_size: Natural = 64
    """Positions of a page of keys and values; 0: contiguous caches, without a kernel."""
    rows: tuple[Count, ...] = (1, 8, 32, 64, 128)
    """Rows generated at once, in section 2."""
    few: tuple[Count, ...] = (8, 64)
    """Rows of section 3; sections 4 and 7 have the last of them."""
    prompt: PromptLength = 1024
    """Tokens of a prompt."""
    new: Count = 384
    """Tokens of an answer, in sections 2, 3 and 7."""
    answer: Count = 1024
    """Tokens of an answer, in section 4."""
    draft_length: DraftLength = 3
    """Tokens drafted a round (K)."""
    other_lengths: tuple[DraftLength, ...] = (1, 5, 7)
    """Draft lengths of section 3."""
    acceptance: Acceptance = 3.3
    """Tokens that a round of 3 drafts keeps on average, whatever the draft says. Other lengths have
    the same chance of each draft."""
    right_layers: LayerCount = 4
    """Layers of the model of section 1."""
    step_model: StepModel = "lora"
    """Policy of sections 5 and 6: the one above with LoRA 16 or all its weights, or all weights of
    a Qwen3-1.7B."""
    step_prompts: Count = 4
    """Prompts of a step."""
    group: GroupSize = 8
    """Answers to each prompt (G)."""
    step_prompt: PromptLength = 256
    """Tokens of a step's prompts."""
    step_new: Count = 1024
    """Tokens of a step's answers."""
    seed: Seed = 0
    """Of weights, prompts and sampling."""

    def check(self) -> None:
        require(
            bool(self.section_numbers) or not self.sections,
            f"--sections is {self.sections!r}; give numbers of {min(SECTION_TITLES)} to"
            f" {max(SECTION_TITLES)} with commas between them, such as 0,1,2",
        )
        require(
            not (self.prepare and self.programs),
            "--prepare makes a folder of programs and --programs uses one; give one of the two",
        )
        require(
            bool(self.prepare) == bool(self.hardware),
            "--prepare FOLDER and --hardware NAME go together: the card that programs are compiled"
            " for; give both or none",
        )
        require(
            bool(self.rows and self.few),
            f"--rows is {self.rows} and --few {self.few}; give a number of rows each, such as 64",
        )
        max_draft_length = max(self.draft_length, *self.other_lengths, 0)
        for names, answer_tokens, rounds in (
            ("--new", self.new, TIMED_SLICES + 1),
            ("--answer or --step_new", min(self.answer, self.step_new), 2),
        ):
            require(
                rounds * (max_draft_length + 1) <= answer_tokens,
                f"{names} {answer_tokens} has less than {rounds} rounds of --draft_length or"
                f" --other_lengths {max_draft_length}; make it at least"
                f" {rounds * (max_draft_length + 1)}",
            )
        require(
            self.draft_vocab <= self.vocab,
            f"--draft_vocab {self.draft_vocab} is larger than --vocab {self.vocab}; give at most"
            " as many ids",
        )
        max_rows = max(*self.rows, *self.few, self.step_prompts * self.group)
        tokens = max(self.prompt + max(self.new, self.answer), self.step_prompt + self.step_new)
        require_countable(
            f"--rows, --few or --step_prompts x --group: {max_rows}", max_rows, tokens
        )

    @property
    def section_numbers(self) -> tuple[int, ...]:
        """Numbers of the sections; empty if they are no such numbers."""
        words = [word.strip() for word in self.sections.split(",")]
        are_valid = all(word.isdecimal() and int(word) in SECTION_TITLES for word in words)
        return tuple(dict.fromkeys(map(int, words))) if are_valid else ()

    @property
    def policy(self) -> ModelSpec:
        """The policy."""
        names = ("layers", "embed", "heads", "kv_heads", "head_size", "ffn", "vocab")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        config = ModelConfig(
            **sizes, rope_theta=QWEN3_8B.rope_theta, tied=False, dtype=self.dtype, remat=True
        )
        return spec_without_checkpoint(config)

    @property
    def step_policy(self) -> ModelSpec:
        """The policy of a GRPO step."""
        if self.step_model == "1.7b":
            return spec_without_checkpoint(replace(QWEN3_1_7B, dtype=self.dtype, remat=True))
        return self.policy

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters that a step trains; 0: it trains all weights."""
        return 16 if self.step_model == "lora" else 0

    @property
    def table_sizes(self) -> dict[str, Any]:
        """What is measured of these sizes."""
        return {name: getattr(self, name) for name in ("rows", "few", "other_lengths")}

    @property
    def program_sizes(self) -> dict[str, Any]:
        """All that programs of the same name depend on."""
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
"""By --size."""
