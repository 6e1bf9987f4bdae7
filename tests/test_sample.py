"""Answers on the terminal: what is printed is what generation gives, marked where drafts were
accepted; what is refused, and how."""

import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from rich.console import Console
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.config.as_json import to_json
from jaxspec.config.check import check_config
from jaxspec.config.cli import override_settings
from jaxspec.config.settings import (
    DraftConfig,
    DynamicSamplingConfig,
    KlConfig,
    LookupConfig,
    MeshConfig,
    OfflineConfig,
    ResolvedConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.job import make_job
from jaxspec.host.loaded_run import RoundTokens
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.sample import RowWriter, main, options_from_config, sampling_config
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.tokens.tokenizer import Tokenizer, character_tokenizer
from tests import fork_server
from tests.conftest import small_mesh, tiny_network
from tests.plain_answers import CONFIG, answers, cut, marked, plain, policy

PROMPTS = ("3+4=", "1,2,", "9#9#")


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has its devices and its compilation cache already."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "kept")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints 1 (its draft is blind) and 3 (its draft is the policy
    itself), saved from a mesh of eight; it made two updates a batch, near a reference policy, from
    batches that several rollouts fill."""
    folder = tmp_path_factory.mktemp("run")
    trained = dataclasses.replace(
        CONFIG,
        batch=dataclasses.replace(CONFIG.batch, mini_batches=2),
        kl=KlConfig(beta=0.1),
        dynamic_sampling=DynamicSamplingConfig(max_batches=2),
    )
    job = make_job(trained, small_mesh(8, 1))
    save = Checkpoints(folder / "checkpoints")
    finished = jax.jit(lambda: job.step.empty_scored_rollout(16))()
    start = jax.jit(job.step.init_state, out_shardings=job.step.state_shardings())
    for number, draft in (
        (1, tiny_network(Decoder, CONFIG.model, seed=9, scale=0.0)),
        (3, policy()),
    ):
        save.save(number, (start(policy(), draft), finished), {"batch": number})
    save.close()
    (folder / "config.json").write_text(json.dumps(to_json(trained)))
    return folder


def sample(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> list[str]:
    assert main(["--checkpoint", str(run), *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_text_is_that_of_plain_decoding_with_every_accepted_token_in_brackets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(PROMPTS) + "\n\n"))
    printed = sample(capsys, run)
    expected = answers(*PROMPTS)
    assert f"checkpoint 3 of {run}: model draft, K=3, coupled rule" in printed[0]
    assert "[in brackets]" in printed[1]
    blocks = [printed[start : start + 3] for start in range(2, len(printed), 3)]
    assert len(blocks) == len(PROMPTS)
    for prompt, (row,), (asked, text, end) in zip(PROMPTS, expected, blocks, strict=True):
        assert asked == f"> {prompt}"
        # a draft that is never wrong
        pieces = cut(row, lambda done, row=row: (row + [-1] * 3)[len(done) : len(done) + 3])
        assert text == marked(pieces)
        assert plain(text) == character_tokenizer().decode(row)
        assert (
            f"acceptance_length {len(row) / len(pieces):.2f}, {len(row) / len(pieces):.2f} tokens a"
            " target pass" in end
        )
        assert f"{len(row)} tokens in" in end
        assert end.endswith(
            "ended by eos" if row[-1] in character_tokenizer().stop_ids else "ended by length"
        )


@pytest.mark.slow
def test_a_lookup_in_place_of_the_runs_draft_marks_what_it_found(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    (row,), ids = (
        answers(PROMPTS[1], temperature=0.5)[0],
        character_tokenizer().encode_prompt(PROMPTS[1]),
    )

    def latest(done: list[int]) -> list[int]:
        text = ids + done
        best = (0, 0, 0)
        for place in range(1, len(text)):  # the token after text[:place]
            size = next(
                (n for n in range(5) if n >= place or text[place - 1 - n] != text[-1 - n]), 5
            )
            best = max(best, (size, min(4, len(text) - place), place))
        return text[best[2] : best[2] + 4] if best[0] >= 1 else []

    pieces = cut(row, latest)
    assert sum(accepted for _, accepted in pieces) > 0, "the oracle finds nothing"
    words = (
        "--temperature",
        "0.5",
        "--prompt",
        PROMPTS[1],
        "--lookup.min_match",
        "1",
        "--draft.draft_length",
        "4",
    )
    # a single row of history has only its own text
    for kind in (("ngram", "--lookup.rule", "latest"), ("history",)):
        printed = sample(capsys, run, "--draft.kind", *kind, *words)
        assert printed[2] == marked(pieces)
        drafted = [
            tokens
            for (tokens, _), done in zip(
                pieces, np.cumsum([0] + [len(t) for t, _ in pieces]), strict=False
            )
            if latest(row[:done])
        ]
        assert f"acceptance_length {np.mean([len(tokens) for tokens in drafted]):.2f}" in printed[3]


@pytest.mark.slow
def test_plain_decoding_beside_it_has_the_same_text_and_no_marks(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    printed = sample(capsys, run, "--draft.kind", "none", "--prompt", PROMPTS[0], "--seed", "5")
    assert "no draft" in printed[0]
    assert printed[2] == marked([(answers(PROMPTS[0], seed=5)[0][0], 0)])
    assert "acceptance_length 1.00, 1.00 tokens a target pass" in printed[3]


@pytest.mark.slow
def test_an_older_checkpoint_and_a_longer_answer(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    words = (
        "--prompt",
        PROMPTS[0],
        "--temperature",
        "0",
        "--draft.draft_length",
        "5",
        "--verify",
        "block",
    )
    printed = sample(capsys, run / "checkpoints" / "1", *words)
    assert f"checkpoint 1 of {run}: model draft, K=5, block rule, temperature 0" in printed[0]
    assert plain(printed[2]) == character_tokenizer().decode(
        answers(PROMPTS[0], temperature=0.0)[0][0]
    )


@pytest.mark.slow
def test_several_answers_follow_one_another(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    printed = sample(capsys, run, "--prompt", PROMPTS[2], "--samples", "3", "--seed", "1")
    rows = answers(PROMPTS[2], seed=1, rows=3)[0]
    assert [plain(line) for line in printed[3:9:2]] == [
        character_tokenizer().decode(row) for row in rows
    ]
    assert [line.split(":")[0] for line in printed[2:8:2]] == [
        "-- 1 of 3",
        "-- 2 of 3",
        "-- 3 of 3",
    ]
    ended = sum(row[-1] in character_tokenizer().stop_ids for row in rows)
    assert printed[8].endswith(
        {0: "length x 3", 1: "eos, length x 2", 2: "eos x 2, length", 3: "eos x 3"}[ended]
    )
    assert len({tuple(row) for row in rows}) > 1


class TestWriter:
    def test_characters_of_several_bytes_appear_whole(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(
            models.BPE(
                {"<eos>": 0} | {token: place for place, token in enumerate(alphabet, start=1)}, []
            )
        )
        backend.pre_tokenizer, backend.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            decoders.ByteLevel(),
        )
        tokenizer = Tokenizer(backend, {"eos_token": "<eos>"}, "bytes")
        ids = tokenizer.encode("aé漢🙂b")
        assert len(ids) == 1 + 2 + 3 + 4 + 1
        file = io.StringIO()
        writer, seen = RowWriter(Console(file=file), tokenizer), []
        for token in ids:
            writer.write(RoundTokens([token], 0))
            seen.append(file.getvalue())
        assert list(dict.fromkeys(seen)) == ["a", "aé", "aé漢", "aé漢🙂", "aé漢🙂b"]
        writer.write(RoundTokens(ids[1:2], 0))  # ends in the middle of a character
        writer.close()
        assert file.getvalue() == "aé漢🙂b\N{REPLACEMENT CHARACTER}\n"

    def test_a_terminal_shows_drafts_in_colour(self) -> None:
        file, tokenizer = io.StringIO(), character_tokenizer()
        writer = RowWriter(
            Console(file=file, force_terminal=True, color_system="standard"), tokenizer
        )
        writer.write(RoundTokens(tokenizer.encode("12+"), 2))
        writer.write(RoundTokens(tokenizer.encode("3"), 0))
        writer.close()
        assert file.getvalue() == "\x1b[4;32m12\x1b[0m+3\n"


class TestRefusals:
    @staticmethod
    def settings(config: ResolvedConfig, *words: str) -> ResolvedConfig:
        return sampling_config(
            config, override_settings(options_from_config(config), words, "sample", ""), words
        )

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (
                ["--draft.kind", "eagle3"],
                [
                    "the run's draft is model",
                    "--draft.kind eagle3",
                    "model, none, ngram and history",
                ],
            ),
            (["--draft.model.layers", "2"], ["--draft.model.layers 2", "trained with 4"]),
            (["--draft.path", "other"], ["--draft.path other", "trained with ''"]),
            (["--draft.vocab", "0"], ["there is no --draft.vocab", "--draft.eagle3.vocab"]),
            (
                ["--draft.kind", "none", "--draft.draft_length", "2"],
                ["draft.kind none", "no use for --draft.draft_length"],
            ),
            (["--draft.draft_length", "30"], ["draft.draft_length 30", "max_new_tokens 24"]),
            (["--temperature", "-1"], ["temperature is -1"]),
            (
                ["--draft.kind", "none", "--lookup.beside", "ngram"],
                ["lookup.beside ngram needs a learned draft", "draft.kind is none"],
            ),
            (["--prompt", "who?"], ["'who'"]),
            (["--samples", "2000000000"], ["--samples 2000000000", "lower one"]),
            (
                ["--lookup.past", "2147483647", "--lookup.beside", "history", "--samples", "2"],
                ["lookup.past 2147483647", "lower one"],
            ),
        ],
    )
    def test_settings(self, run: Path, given: list[str], words: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            main(["--checkpoint", str(run), *given])
        assert [word for word in words if word not in str(caught.value)] == []
        assert "rollout." not in str(caught.value)

    def test_answers_may_be_shorter_than_the_texts_that_the_draft_was_trained_on(self) -> None:
        config = dataclasses.replace(
            CONFIG,
            draft_training=dataclasses.replace(CONFIG.draft_training, ttt_steps=20),
            mesh=MeshConfig(),
        )
        config = dataclasses.replace(
            config,
            rollout=dataclasses.replace(CONFIG.rollout, draft=DraftConfig()),
            offline=OfflineConfig(),
        )
        check_config(self.settings(config, "--max_new_tokens", "5"), devices=1)

    @pytest.mark.parametrize("kind", ["none", "ngram", "history"])
    def test_settings_of_the_runs_own_kind_give_way(self, kind: str) -> None:
        draft, lookup = DraftConfig(eagle3=Eagle3Config(vocab=20)), LookupConfig(beside="ngram")
        rollout = dataclasses.replace(CONFIG.rollout, draft=draft, lookup=lookup)
        config = dataclasses.replace(
            CONFIG, rollout=rollout, offline=OfflineConfig(), mesh=MeshConfig()
        )
        sampled = self.settings(config, "--draft.kind", kind)
        assert (sampled.draft_spec.vocab, sampled.rollout.lookup.beside) == (0, "none")
        check_config(sampled, devices=1)
        with pytest.raises(ConfigError, match=r"no use for --rollout\.draft\.eagle3\.vocab"):
            self.settings(config, "--draft.kind", kind, "--draft.eagle3.vocab", "20")
        assert self.settings(config).rollout.draft.eagle3.vocab == 20

    def test_the_runs_tokenizer_may_have_moved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        config = dataclasses.replace(
            CONFIG, data=dataclasses.replace(CONFIG.data, tokenizer="qwen")
        )
        with pytest.raises(
            ConfigError, match=rf"not at {tmp_path}/qwen/tokenizer\.json; .* --tokenizer"
        ):
            self.settings(config)
        (tmp_path / "moved").mkdir()
        (tmp_path / "moved" / "tokenizer.json").write_text("{}")
        assert self.settings(config, "--tokenizer", "moved").data.tokenizer == "moved"
        with pytest.raises(
            ConfigError, match="the run was trained with the built-in characters; leave it out"
        ):
            self.settings(CONFIG, "--tokenizer", "moved")

    def test_a_bad_line_is_named_and_the_next_one_answered(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"what\n{PROMPTS[0]}\n"))
        status = main(["--checkpoint", str(run), "--draft.kind", "none", "--seed", "5"])
        printed = capsys.readouterr()
        assert status == 2
        assert "'what'" in printed.err
        assert printed.out.splitlines()[4] == character_tokenizer().decode(
            answers(PROMPTS[0], seed=5)[0][0]
        )

    def test_help_shows_the_runs_settings(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        for words, default in (
            (["--checkpoint", str(run)], "(default: 24)"),
            ([], "(default: 28)"),
        ):
            with pytest.raises(SystemExit) as caught:
                main([*words, "--help"])
            assert caught.value.code == 0
            text = capsys.readouterr().out
            assert default in text
            assert "in brackets" in re.sub(r"[│\s]+", " ", text).replace("[in ", "in ")


@pytest.mark.slow
def test_the_program_leaves_a_run_as_it_is(run: Path, repository: Path, tmp_path: Path) -> None:
    half = run / "checkpoints" / "4.orbax-checkpoint-tmp-1"  # of a run that is saving
    half.mkdir()
    before = sorted(path for path in run.rglob("*"))
    variables = os.environ | {
        "JAXSPEC_CACHE": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(repository),
    }
    variables = {
        name: value
        for name, value in variables.items()
        if name not in ("JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR")
    }
    command = [sys.executable, "-m", "jaxspec.sample", "--checkpoint", str(run)]
    done = fork_server.run(
        command,
        input=PROMPTS[0],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert plain(done.stdout.splitlines()[3]) == character_tokenizer().decode(
        answers(PROMPTS[0])[0][0]
    )
    assert sorted(path for path in run.rglob("*")) == before
    half.rmdir()
    refused = fork_server.run(
        [*command[:-1], "nowhere"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "error: --checkpoint nowhere" in refused.stderr
