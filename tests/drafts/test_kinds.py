"""A kind of draft is a folder and its entries in kinds.py: a toy with a setting of its own is added
to a copy of the package by these two alone, and every program knows it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SETTINGS = '''"""Settings and specification of the toy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxspec.inputs.checked import CheckedConfig
from jaxspec.inputs.spec import Count, DraftSpec, ModelSpec, RunFacts


@dataclass(frozen=True, kw_only=True)
class RepeatConfig(CheckedConfig, prefix="rollout.draft.repeat."):
    """Repetition of one token."""

    back: Count = 1
    """Distance of the token that is repeated. 1 = the last one."""


@dataclass(frozen=True, kw_only=True)
class RepeatSpec(DraftSpec):
    """Specification of a toy draft."""

    kind: ClassVar[str] = "repeat"
    max_length: int
    policy: ModelSpec
    back: int

    @classmethod
    def from_run(cls, settings: RepeatConfig, run: RunFacts) -> RepeatSpec:
        """Makes the spec of a run's draft."""
        return cls(max_length=run.max_length, policy=run.policy, back=settings.back)
'''
KIND = '''"""A toy: the likeliest token after one of the last, by a table that repeats at first."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.drafts.base import Draft, DraftFiles, FileFacts, Kind, Learned, PointProposal, Unroll
from jaxspec.drafts.repeat.settings import RepeatSpec


class Table(nnx.Module):
    def __init__(self, vocab):
        self.table = nnx.Param(jnp.eye(vocab), axes=("vocab", None))


def _repeat(spec, stop_ids):
    def propose(network, target, state, cache, context, sample, length):
        last = context.tokens_at(context.lengths[:, None] - spec.back)
        following = jnp.argmax(network.table[...][last], axis=-1).astype(last.dtype)
        tokens = jnp.broadcast_to(following, (len(last), length))
        lengths = jnp.full(len(last), length, jnp.int32)
        return state, cache, PointProposal(tokens, lengths)

    return Draft(
        max_length=spec.max_length,
        taps=(),
        is_stochastic=False,
        empty_cache=lambda network, rows, positions: None,
        init_state=lambda network, target, prompts: (),
        prefill=lambda network, target, state, cache, pieces, features: (state, cache),
        catch_up=lambda network, target, state, cache, context: (state, cache),
        propose=propose,
        commit=lambda state, committed: state,
    )


def _export(network, export):
    table = np.asarray(network.table[...], export.dtype)
    return DraftFiles({}, [("table", table.nbytes, lambda: table)])


REPEAT = Kind(
    make_spec=RepeatSpec.from_run,
    build=_repeat,
    learned=Learned(
        decoder_spec=lambda spec: spec.policy,
        init_network=lambda spec, key: Table(spec.policy.vocab),
        check_spec=lambda spec: None,
        size_pairs=lambda network, policy: {"vocabulary": (len(network.table[...]), policy.vocab)},
        block_size=lambda length: 1,
        unroll=Unroll(
            depth_count=lambda steps: 1,
            min_context=lambda depths: jnp.zeros((1,), jnp.int32),
            hidden_states=lambda network, target, forward, pack, depths: (
                network.table[...][pack.tokens][:, :, None]
            ),
            logits=lambda network, target, hidden: hidden,
            vocabulary=lambda network: None,
        ),
        read_facts=lambda spec, folder, log: FileFacts(None, None),
        check_files=lambda spec, folder, tokens: None,
        load_network=lambda spec, folder, shapes: None,
        export_files=_export,
    ),
)
'''
AXES = ', axes=("vocab", None)'
ENTRIES = {
    'Literal["eagle3", "mtp", "model", "ngram", "history", "none"]': (
        'Literal["eagle3", "mtp", "model", "ngram", "history", "repeat", "none"]'
    ),
    "from jaxspec.inputs.checked import": (
        "from jaxspec.drafts.repeat.settings import RepeatConfig\n"
        "from jaxspec.inputs.checked import"
    ),
    "    model: DraftModelConfig": (
        "    repeat: RepeatConfig = field(default_factory=RepeatConfig)\n"
        "    model: DraftModelConfig"
    ),
    '        case "mtp":\n': (
        '        case "repeat":\n'
        "            from jaxspec.drafts.repeat.kind import REPEAT as kind\n"
        '        case "mtp":\n'
    ),
}
SMALL = (
    "--model.layers 1 --model.embed 8 --model.heads 2 --model.kv_heads 1 --model.head_size 4"
    " --model.ffn 8 --sft.steps 0 --steps 2 --rollout.max_new_tokens 6 --eval.every 10"
)


@pytest.fixture(scope="module")
def package(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with one folder more and one file changed."""
    copy = tmp_path_factory.mktemp("toy")
    for folder in ("jaxspec", "configs"):
        shutil.copytree(repository / folder, copy / folder)
    toy = copy / "jaxspec/drafts/repeat"
    toy.mkdir()
    (toy / "__init__.py").write_text("")
    (toy / "settings.py").write_text(SETTINGS)
    (toy / "kind.py").write_text(KIND)
    kinds = copy / "jaxspec/drafts/kinds.py"
    text = kinds.read_text()
    for old, new in ENTRIES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    kinds.write_text(text)
    return copy


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "JAXSPEC_CACHE": str(package / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def answers(package: Path) -> dict[str, list[dict[str, float]]]:
    """The metrics of a run with the toy, and of one without a draft."""
    found = {}
    for kind in ("repeat", "none"):
        words = f"jaxspec.train --config rl_zero.py --workdir {kind} --rollout.draft.kind {kind}"
        words += " --rollout.draft.repeat.back 2" * (kind == "repeat")
        more = " --rollout.verify coupled --offline.steps 0 --draft_training.no_online"
        done = run(package, *f"{words} {SMALL}{more}".split())
        assert done.returncode == 0, done.stderr
        found[kind] = [
            json.loads(line) for line in (package / kind / "metrics.jsonl").read_text().splitlines()
        ]
    return found


def test_a_new_kind_is_a_folder_and_its_entries(answers: dict[str, list[dict[str, float]]]) -> None:
    """It trains, and its rounds draft: the very tokens of plain decoding, by coupled noise."""
    assert [each["rollout/tokens"] for each in answers["repeat"]] == [
        each["rollout/tokens"] for each in answers["none"]
    ]
    assert [each["reward/mean"] for each in answers["repeat"]] == [
        each["reward/mean"] for each in answers["none"]
    ]
    rounds = [sum(each["rollout/rounds"] for each in answers[kind]) for kind in ("repeat", "none")]
    assert rounds[0] < rounds[1]


@pytest.mark.usefixtures("answers")
def test_its_setting_is_saved_shown_and_refused_with_other_kinds(package: Path) -> None:
    saved = json.loads((package / "repeat/config.json").read_text())
    assert saved["rollout"]["draft"]["repeat"] == {"back": 2}
    told = run(package, *["jaxspec.train", "--config", "rl_zero.py", "--help", "all"])
    assert "--rollout.draft.repeat.back INT" in told.stdout
    assert "Distance of the token that is repeated." in told.stdout
    for words, message in {
        "": "with rollout.draft.kind eagle3 there is no use for --rollout.draft.repeat.back",
        "--rollout.draft.kind repeat --rollout.draft.repeat.back 0": "it must be at least 1",
    }.items():
        given = words or "--rollout.draft.repeat.back 2"
        refused = run(package, "jaxspec.train", "--config", "rl_zero.py", *given.split())
        assert refused.returncode == 2
        assert message in refused.stderr
    words = (
        f"jaxspec.train --config rl_zero.py --workdir repeat {SMALL} --rollout.draft.kind repeat"
        " --rollout.verify coupled --offline.steps 0 --draft_training.no_online"
    )
    resumed = run(package, *words.split())
    assert "rollout.draft.repeat.back: 2 -> 1" in resumed.stderr


@pytest.mark.usefixtures("answers")
def test_every_program_knows_it(package: Path) -> None:
    told = run(package, *["jaxspec.train", "--config", "rl_zero.py", "--help", "all"])
    assert "history,repeat,none" in told.stdout.replace(" ", "")
    vain = run(
        package,
        *["jaxspec.train", "--config", "rl_zero.py", "--rollout.draft.kind", "repeat"],
        *["--rollout.draft.mtp.layers", "2", "--offline.rows", "8"],
    )
    assert vain.returncode == 2
    assert "with rollout.draft.kind repeat there is no use for" in vain.stderr
    assert "--rollout.draft.mtp.layers" in vain.stderr
    sampled = run(
        package,
        *["jaxspec.sample", "--checkpoint", "repeat", "--prompt", "1+1=", "--max_new_tokens", "4"],
    )
    assert sampled.returncode == 0, sampled.stderr
    assert "repeat draft, K=3" in sampled.stdout
    other = run(
        package,
        *["jaxspec.sample", "--checkpoint", "none", "--prompt", "1+1=", "--draft.kind", "mtp"],
    )
    assert "possible are none, ngram and history" in other.stderr, "the toy has weights"
    exported = run(package, *["jaxspec.export", "--checkpoint", "repeat", "--out", "exported"])
    assert exported.returncode == 0, exported.stderr


@pytest.mark.usefixtures("answers")
def test_a_weight_of_a_new_kind_says_its_axes(package: Path) -> None:
    """Where it is made; without them the run ends before anything is compiled."""
    toy = package / "jaxspec/drafts/repeat/kind.py"
    assert KIND.count(AXES) == 1
    toy.write_text(KIND.replace(AXES, ""))
    try:
        words = "--workdir refused --rollout.draft.kind repeat --offline.steps 0"
        done = run(package, *f"jaxspec.train --config rl_zero.py {words} {SMALL}".split())
    finally:
        toy.write_text(KIND)
    assert done.returncode != 0
    assert "the weight draft.table of shape" in done.stderr
    assert "state 2 where it is made" in done.stderr
