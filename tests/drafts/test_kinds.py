"""A kind of draft is one file and its name in kinds.py: a toy is added to a copy of the package by
these two alone, and every program knows it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOY = '''"""A toy: the likeliest token after the last one, by a table that repeats it at first."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.drafts.base import Draft, DraftFiles, Kind, Learned, Proposal, Unroll


class Table(nnx.Module):
    def __init__(self, vocab):
        self.table = nnx.Param(jnp.eye(vocab), axes=("vocab", None))


def _repeat(spec, stop_ids):
    length = spec.max_length

    def propose(network, target, state, cache, context, sample, length):
        last = context.tokens_at(context.lengths[:, None] - 1)
        following = jnp.argmax(network.table[...][last], axis=-1).astype(last.dtype)
        tokens = jnp.broadcast_to(following, (len(last), length))
        lengths = jnp.full(len(last), length, jnp.int32)
        return state, cache, Proposal(tokens=tokens, logits=None, lengths=lengths)

    return Draft(
        max_length=length,
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
        resolve_spec=lambda spec, folder, log: spec,
        check_files=lambda spec, folder, tokens: None,
        load_network=lambda spec, folder, shapes: None,
        export_files=_export,
    ),
)
'''
AXES = ', axes=("vocab", None)'
NAMES = (
    'Literal["eagle3", "mtp", "model", "ngram", "history", "none"]',
    'Literal["eagle3", "mtp", "model", "ngram", "history", "repeat", "none"]',
)
CHOICE = (
    '        case "mtp":\n',
    '        case "repeat":\n'
    "            from jaxspec.drafts.repeat import REPEAT as kind\n"
    '        case "mtp":\n',
)
SMALL = (
    "--model.layers 1 --model.embed 8 --model.heads 2 --model.kv_heads 1 --model.head_size 4"
    " --model.ffn 8 --sft.steps 0 --steps 2 --rollout.max_new_tokens 6 --eval.every 10"
)


@pytest.fixture(scope="module")
def package(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with one file more and one changed."""
    copy = tmp_path_factory.mktemp("toy")
    for folder in ("jaxspec", "configs"):
        shutil.copytree(repository / folder, copy / folder)
    (copy / "jaxspec/drafts/repeat.py").write_text(TOY)
    kinds = copy / "jaxspec/drafts/kinds.py"
    text = kinds.read_text()
    for old, new in (NAMES, CHOICE):
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
        more = " --rollout.verify coupled --offline.steps 0 --draft_training.no_online"
        done = run(package, *f"{words} {SMALL}{more}".split())
        assert done.returncode == 0, done.stderr
        found[kind] = [
            json.loads(line) for line in (package / kind / "metrics.jsonl").read_text().splitlines()
        ]
    return found


def test_a_new_kind_is_two_files(answers: dict[str, list[dict[str, float]]]) -> None:
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
def test_every_program_knows_it(package: Path) -> None:
    told = run(package, *["jaxspec.train", "--config", "rl_zero.py", "--help", "all"])
    assert "history,repeat,none" in told.stdout.replace(" ", "")
    vain = run(
        package,
        *["jaxspec.train", "--config", "rl_zero.py", "--rollout.draft.kind", "repeat"],
        *["--rollout.draft.layers", "2", "--offline.rows", "8"],
    )
    assert vain.returncode == 2
    assert "with rollout.draft.kind repeat there is no use for" in vain.stderr
    assert "--rollout.draft.layers" in vain.stderr
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
    toy = package / "jaxspec/drafts/repeat.py"
    assert TOY.count(AXES) == 1
    toy.write_text(TOY.replace(AXES, ""))
    try:
        words = "--workdir refused --rollout.draft.kind repeat --offline.steps 0"
        done = run(package, *f"jaxspec.train --config rl_zero.py {words} {SMALL}".split())
    finally:
        toy.write_text(TOY)
    assert done.returncode != 0
    assert "the weight draft.table of shape" in done.stderr
    assert "state 2 where it is made" in done.stderr
