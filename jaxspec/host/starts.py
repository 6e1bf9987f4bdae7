"""Records of the starts of a run."""

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.config.as_json import (
    to_json,
)
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.files import data_digest
from jaxspec.hf.pretrained import fingerprint_checkpoint
from jaxspec.host.job import code_version
from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import parse_json
from jaxspec.processes.devices import describe_machine
from jaxspec.processes.process_0 import check_in_process_0
from jaxspec.system.files import (
    hash_file,
    utc_timestamp,
    write_text_atomic,
)
from jaxspec.system.terminal import LinePrinter
from jaxspec.tokens.tokenizer import TOKENIZER_FILES

CONFIG, CHECKPOINTS, BEST = "config.json", "checkpoints", "best"
STARTS = "starts.jsonl"


def list_checkpoints(folder: Path, subfolder: str = CHECKPOINTS) -> list[int]:
    """Lists the numbers of a run's checkpoints, ascending.

    Raises:
      ConfigError: The folder of checkpoints is not a folder, or one of its entries has the name
        of a checkpoint but is not one.
    """
    checkpoints = folder / subfolder
    # A broken symlink does not exist, but must be reported too.
    exists = checkpoints.exists() or checkpoints.is_symlink()
    remedy = "move it away if it is not needed, or choose another --workdir"
    require(
        not exists or checkpoints.is_dir(),
        f"{checkpoints} is not a folder, so no checkpoint can be read or saved; {remedy}",
    )
    entries = [entry for entry in checkpoints.iterdir() if entry.name.isdigit()] if exists else []
    for entry in entries:
        name = entry.name
        # int also accepts digits of other scripts and leading zeros, which orbax never writes.
        is_valid = name.isascii() and name == str(int(name)) and entry.is_dir()
        require(is_valid, f"{entry} is called like a checkpoint but is not one; {remedy}")
    return sorted(int(entry.name) for entry in entries)


def data_digests(config: ResolvedConfig) -> dict[str, str]:
    """Returns digests of data files and tokenizer files, by setting and path."""
    sets = {key: entry.data for key, entry in config.sets_by_prefix.items()}
    paths = {f"{key}data.path": data.path for key, data in sets.items()}
    paths |= {f"{key}data.eval_path": data.eval_path for key, data in sets.items() if data.path}
    digests = {f"{name} {path}": data_digest(path, name) for name, path in paths.items() if path}
    folder = config.data.tokenizer
    for name in TOKENIZER_FILES if folder else ():
        file = Path(folder) / name
        digests[f"data.tokenizer {name} {file}"] = hash_file(file)
    return digests


def require_same_data(config: ResolvedConfig, folder: Path, say: LinePrinter) -> None:
    """Checks that the data is that of the run's first start.

    Warns of files that the first start did not record. Data files that are missing are skipped,
    since reading them later reports the error.

    Raises:
      ConfigError: Some data has changed.
    """
    records, digests = read_starts(folder), data_digests(config)
    recorded = records[0].get("data") if records else None
    # Records may come from an older version or have been edited by hand.
    recorded = recorded if isinstance(recorded, dict) else {}
    current = {
        name: value
        for name, value in digests.items()
        if value != "-" or name.startswith("data.tokenizer")
    }
    if unknown := ", ".join(sorted(current.keys() - recorded.keys())):
        say(
            f"warning: {folder / STARTS} has no record of {unknown} from the run's first start,"
            " so it cannot be compared"
        )
    names = ", ".join(name for name, value in current.items() if recorded.get(name, value) != value)
    message = (
        f"{names} holds other data than the run in {folder} began with, at"
        f" {records[0].get('time') if records else ''}"
    )
    require(
        not names, f"{message}; put that data back, or choose another --workdir for a run on this"
    )


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Reads a run's start records, oldest first.

    Raises:
      ConfigError: The file or one of its lines is damaged.
    """
    file = folder / STARTS
    remedy = "put the file back from a copy, or remove it"
    require(not file.exists() or file.is_file(), f"{file} is not a regular file; {remedy}")
    records = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], start=1):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is not JSON ({error}); {remedy}") from error
        require(isinstance(record, dict), f"{file}, line {number} is no JSON object; {remedy}")
        records.append(record)
    return records


def report_start(
    config: ResolvedConfig, mesh: Mesh, folder: Path, say: LinePrinter
) -> dict[str, Any]:
    """Prints this start in one line, and returns its record.

    The record has time, versions, machine, and digests of data and input checkpoints. It is empty
    except in process 0. Warns if versions or checkpoints differ from those of the run's last start.

    Raises:
      ConfigError: An input or the records of earlier starts cannot be read.
    """
    record: dict[str, Any] = {}

    def print_start() -> None:
        record.update(_describe_start(config, mesh))
        versions, machine = record["versions"], record["machine"]
        versions_text = ", ".join(f"{name} {version}" for name, version in versions.items())
        say(
            f"{record['time']}  {versions_text}  {machine['backend']} ({machine['device']}) on"
            f" {machine['host']}, {machine['platform']}"
        )
        # A run without checkpoints starts over, so its earlier starts do not matter.
        last_records = read_starts(folder)[-1:] if list_checkpoints(folder) else []
        for kind in ("versions", "checkpoints") if last_records else ():
            recorded = last_records[0].get(kind)
            recorded = recorded if isinstance(recorded, dict) else {}
            for name, value in record[kind].items():
                if recorded.get(name, value) == value:
                    continue
                # Input checkpoints are read at the first start only.
                change = "; the run continues with the weights that it has saved"
                if kind == "versions":
                    change = f": {recorded[name]} -> {value}"
                say(f"warning: since the run's last start, {name} has changed{change}")

    check_in_process_0(print_start)
    return record


def _describe_start(config: ResolvedConfig, mesh: Mesh) -> dict[str, Any]:
    """Collects the record of this start."""
    paths = {
        "model.path": config.model.path,
        "lora.path": config.lora.path,
        "rollout.draft.path": config.rollout.draft.path,
    }
    inputs = {
        f"{name} {path}": fingerprint_checkpoint(path) for name, path in paths.items() if path
    }
    versions = {
        "jaxspec": code_version(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
    }
    environment = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processes": jax.process_count(),
        "backend": jax.default_backend(),
        **describe_machine(mesh),
    }
    return {
        "time": utc_timestamp(),
        "versions": versions,
        "machine": environment,
        "data": data_digests(config),
        "checkpoints": inputs,
    }


def record_start(config: ResolvedConfig, folder: Path, record: Mapping[str, Any]) -> None:
    """Writes config.json and the record of this start, in process 0.

    Call it only once the config has proved valid. Each file is replaced atomically. If the run has
    no checkpoint, records of earlier starts are dropped.
    """
    if jax.process_index() == 0:
        earlier = read_starts(folder) if list_checkpoints(folder) else []
        write_text_atomic(
            folder / STARTS, "".join(json.dumps(entry) + "\n" for entry in (*earlier, record))
        )
        write_text_atomic(folder / CONFIG, json.dumps(to_json(config), indent=2) + "\n")
