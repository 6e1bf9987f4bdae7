"""Exports a run's policy and draft as Hugging Face folders.

`python -m jaxspec.export --checkpoint RUN --out DIR`
"""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.cli import override_settings, take_option
from jaxspec.config.settings import MeshConfig, ResolvedConfig
from jaxspec.drafts.base import DraftFiles, ExportSpec
from jaxspec.drafts.kinds import get_kind, get_learned
from jaxspec.hf.names import policy_mappings
from jaxspec.hf.peft import adapter_config_json, adapter_tensors
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.pretrained import ADAPTER_CONFIG_FILE, ADAPTER_FILE, CONFIG_FILE, stream_tensors
from jaxspec.hf.tensor_files import WEIGHTS_FILE, write_tensors
from jaxspec.host.job import Job, configure_jax, make_job, run_without_saving
from jaxspec.host.loaded_run import SavedRun, check_tokenizer, find_run, read_state
from jaxspec.host.workdir import require_outside_checkpoints
from jaxspec.inputs.checked import CheckedConfig, require
from jaxspec.models.lora import AdaptedDecoder, measure_retention, merge_lora
from jaxspec.processes.devices import count_devices
from jaxspec.state import PyTree
from jaxspec.step import Step
from jaxspec.system.files import SaveError, expand_user_path
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.tokens.tokenizer import Tokenizer

COMMAND = "python -m jaxspec.export"
ABOUT = """Writes a checkpoint of a training run as a Hugging Face folder, for transformers, vLLM,
SGLang or an evaluation harness.

The policy is written to DIR, and its learned draft to DIR/draft. Trained adapters are merged into
the policy, and also written to DIR/adapter. Their base is written to DIR/base, unless it is the
checkpoint that the run started from.

RUN is a run's folder (with config.json and checkpoints/), or one checkpoint in it
(RUN/checkpoints/NUMBER). DIR must not exist yet. Examples:
  python -m jaxspec.export --checkpoint runs/rl_think-qwen3_8b --out qwen3-8b-grpo
  python -m jaxspec.export --checkpoint runs/rl_think-qwen3_8b --out qwen3-8b-grpo \
    --draft speculators    (for vLLM)
  python -m jaxspec.train --config rl_think.py:qwen3_8b --data.path FILE \
    --model.path qwen3-8b-grpo --rollout.draft.path qwen3-8b-grpo/draft \
    --offline.steps 0    (continues training, without training the draft first)"""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files of a tokenizer, copied unchanged."""
GENERATION_CONFIG = "generation_config.json"
DraftFormat = Literal["raw", "speculators", "none"]
"""Format of an exported draft."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CheckedConfig, prefix="--"):
    """Options of the command line."""

    out: str = ""
    """Folder to write. It must not exist yet."""
    draft: DraftFormat = "raw"
    """Format of an EAGLE-3 head: `raw` loads in SGLang, vLLM and SpecForge, `speculators` in vLLM.
    Only vLLM is sure to read unusual taps. `none` leaves the draft out."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. `auto` is the run's model.dtype, but float32 for merged adapters, of
    which a narrower type would lose a part."""
    tokenizer: str = ""
    """Folder of the run's tokenizer, if it has moved since the run."""


LazyTensor = tuple[str, int, Callable[[], np.ndarray]]
"""Name and size in bytes of a tensor, and a function that makes it."""


def export_run(run: SavedRun, options: ExportOptions) -> Path:
    """Writes the folder and returns it. If anything fails, there is no folder.

    Raises:
      ConfigError: no folder is named, it exists, or the options do not fit the run.
      SaveError: the folder cannot be written.
    """
    require(bool(options.out), f"no --out: name the folder to write; see {COMMAND} --help")
    out = expand_user_path(options.out, "--out")
    require_outside_checkpoints(out, "--out", "name another folder")
    require(
        not out.exists(),
        f"--out {options.out} exists already; name another folder, or remove it first",
    )
    tokenizer = options.tokenizer or run.config.data.tokenizer
    check_tokenizer(run.config.data.tokenizer, tokenizer)
    kind = run.config.rollout.draft.kind
    learned_kind = get_kind(kind).learned
    require(
        options.draft != "speculators"
        or (learned_kind is not None and "speculators" in learned_kind.export_formats),
        f"--draft speculators is for EAGLE-3 heads, and the run's draft is {kind}",
    )
    job = _open_job(replace(run.config, data=replace(run.config.data, tokenizer=tokenizer)))
    # The folder is renamed when it is complete, so that an interrupted export leaves none.
    partial_folder = temporary_folder(options)
    try:
        partial_folder.mkdir(parents=True)
        _write_folder(partial_folder, out, job.config, job.step, job.tokenizer, run, options)
        partial_folder.rename(out)
    except OSError as error:
        raise SaveError(
            f"{out} cannot be written: {error.strerror or error}; free some space or name another"
            " folder"
        ) from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return out


def temporary_folder(options: ExportOptions) -> Path:
    """Returns the folder for an incomplete export."""
    # It lies next to the target, since a rename is atomic only within a file system. Host and
    # process are in the name, so that two exports cannot write to the same folder.
    out = expand_user_path(options.out, "--out")
    return out.with_name(f"{out.name}.writing-{os.uname().nodename}-{os.getpid()}")


def _open_job(config: ResolvedConfig) -> Job:
    """Makes a job on all devices of this machine."""
    # The run's mesh may not exist here. Every device holds a shard of the weights.
    configure_jax(config, config.mesh.data * config.mesh.expert * config.mesh.tensor)
    count = count_devices()
    return make_job(replace(config, mesh=MeshConfig(data=count)), meshes.make_mesh(count, 1))


def _write_folder(
    folder: Path,
    out: Path,
    config: ResolvedConfig,
    step: Step,
    tokenizer: Tokenizer,
    run: SavedRun,
    options: ExportOptions,
) -> None:
    """Writes all files to `folder`, which becomes `out`."""
    model = config.model
    state = read_state(run, step, options.draft != "none")
    dtype = jnp.dtype(model.dtype if options.dtype == "auto" else options.dtype)
    learner = state.learner
    policy, network = learner.policy.network, learner.draft.network
    policy_dtype = dtype
    if isinstance(policy, AdaptedDecoder):
        _write_adapter(folder, out, config, tokenizer, policy, dtype)
        if options.dtype == "auto":
            policy_dtype = np.promote_types(dtype, np.float32)
        _report_rounding(policy, policy_dtype)
        policy = jax.jit(merge_lora)(policy)
    content = policy_config_json(model, policy_dtype.name, _special_ids(tokenizer))
    tensors = list(stream_tensors(policy_mappings(model), policy, policy_dtype))
    draft_files = None
    if network is not None:
        draft_files = _export_draft(network, out, config, tokenizer, options.draft, dtype)
    # MTP layers are part of the policy's checkpoint. Other drafts have a folder.
    if draft_files is not None and draft_files.merge_with_policy:
        content, tensors = content | draft_files.config, [*tensors, *draft_files.tensors]
    _write_json(folder / CONFIG_FILE, content)
    _write_tokenizer(folder, config, tokenizer)
    _write_weights(folder, "policy", tensors)
    if draft_files is not None and not draft_files.merge_with_policy:
        (folder / "draft").mkdir()
        if draft_files.needs_tokenizer:
            _write_tokenizer(folder / "draft", config, tokenizer)
        _write_json(folder / "draft" / CONFIG_FILE, draft_files.config)
        _write_weights(folder / "draft", "draft", draft_files.tensors)


def _report_rounding(policy: AdaptedDecoder, dtype: Any) -> None:
    """Reports how much of the adapters' change is kept.

    Prints nothing for types as wide as float32.
    """
    if jnp.finfo(dtype).bits >= 32:
        return
    share = float(jax.jit(partial(measure_retention, dtype=dtype))(policy))
    print(
        f"merged weights rounded to {dtype.name} keep {share:.0%} of the adapters' change; leave"
        " out --dtype to write them in float32, or serve DIR/adapter with its base",
        flush=True,
    )


def _write_adapter(
    folder: Path,
    out: Path,
    config: ResolvedConfig,
    tokenizer: Tokenizer,
    policy: AdaptedDecoder,
    dtype: Any,
) -> None:
    """Writes the trained adapters, and their base if needed."""
    base = config.model.path
    (folder / "adapter").mkdir()
    # No folder has the base yet if the run merged other adapters into it, or began without
    # `model.path`.
    if config.lora.path or not base:
        base = str(out / "base")
        (folder / "base").mkdir()
        _write_json(
            folder / "base" / CONFIG_FILE,
            policy_config_json(config.model, dtype.name, _special_ids(tokenizer)),
        )
        _write_tokenizer(folder / "base", config, tokenizer)
        _write_weights(
            folder / "base",
            "base",
            list(stream_tensors(policy_mappings(config.model), policy.base, dtype)),
        )
    tensors = adapter_tensors(policy).items()
    _write_json(
        folder / "adapter" / ADAPTER_CONFIG_FILE,
        adapter_config_json(config.lora, config.model, base),
    )
    _write_weights(
        folder / "adapter",
        "adapter",
        [(name, array.nbytes, lambda array=array: array) for name, array in tensors],
        ADAPTER_FILE,
    )


def _export_draft(
    network: PyTree,
    out: Path,
    config: ResolvedConfig,
    tokenizer: Tokenizer,
    file_format: DraftFormat,
    dtype: Any,
) -> DraftFiles:
    """Exports a learned draft, for a policy in `out`."""
    draft = config.rollout.draft
    request = ExportSpec(
        policy=replace(config.model, path=str(out)),
        format=file_format,
        dtype=dtype,
        draft_length=draft.max_draft_length,
        special_tokens=_special_ids(tokenizer),
    )
    return get_learned(draft.kind).export_files(network, request)


def _write_weights(
    folder: Path, title: str, tensors: list[LazyTensor], name: str = WEIGHTS_FILE
) -> None:
    with Progress(title, len(tensors)) as progress:
        for number, _ in enumerate(write_tensors(folder, tensors, name), start=1):
            progress.update(number)


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {"eos_token_id": tokenizer.stop_ids[0], "pad_token_id": tokenizer.pad_id}
    return ids | ({"bos_token_id": tokenizer.bos_ids[0]} if tokenizer.bos_ids else {})


def _write_tokenizer(folder: Path, config: ResolvedConfig, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer and a generation config."""
    source = Path(config.data.tokenizer)
    if config.data.tokenizer:
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        tokenizer.save(str(folder))
    # Without a generation config, other libraries would not know all end tokens.
    if not (folder / GENERATION_CONFIG).is_file():
        generation = {**_special_ids(tokenizer), "eos_token_id": list(tokenizer.stop_ids)}
        _write_json(
            folder / GENERATION_CONFIG,
            {**generation, "do_sample": True, "temperature": config.rollout.temperature or 1.0},
        )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str], interrupt: Interrupt) -> int:
    """Exports the run on the command line. Returns the exit status."""
    path, words = take_option(argv, COMMAND, "checkpoint", "RUN --out DIR")
    options = override_settings(
        ExportOptions(), words, f"{COMMAND} --checkpoint {path or 'RUN'}", ABOUT
    )
    require(
        bool(path),
        "no --checkpoint: give a training run's folder, such as --checkpoint runs/rl_think-tiny;"
        f" see {COMMAND} --help",
    )
    run = find_run(path)
    with interrupt.exit_on_signal(
        "writing the folder", lambda: shutil.rmtree(temporary_folder(options), ignore_errors=True)
    ):
        out = export_run(run, options)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e9
    print(f"checkpoint {run.number} of {run.folder} is in {out} ({size:.3g} GB)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_without_saving("starting", lambda interrupt: main(sys.argv[1:], interrupt)))
