"""A draft is trained once for all runs of a policy: what names it in the cache, and what is kept on
the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import (
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    OfflineConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.data.problems import load_sets
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.host import round_cost
from jaxspec.models.decoder import Decoder
from jaxspec.preparation import draft, draft_training
from jaxspec.preparation.draft import ACCEPTANCE
from jaxspec.preparation.policy import policy_key
from jaxspec.rl.optimizers import Diverged
from jaxspec.storage.cache import read_sources
from jaxspec.system.interrupt import Interrupt
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import eagle3, tiny_model, tiny_network, with_weights
from tests.host.training_jobs import VOCAB, Killed, a_job, always_kept, same_bits, trained_draft


class TestCachedDraft:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    @pytest.mark.slow
    def test_killed_and_called_again_it_holds_what_an_uninterrupted_one_does(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = a_job("mtp", 2, offline=OfflineConfig(samples=12, rows=4, steps=5))
        (cache / "0123456789abcdef.partial").mkdir(parents=True)  # of another key
        (cache / "0123456789abcdef.partial" / "learner.npz").write_bytes(b"another draft's")
        always_kept(monkeypatch)
        original = draft_training.Progress.update

        def killed(progress: Any, step: int, **numbers: float) -> None:
            original(progress, step, **numbers)
            if "loss" in numbers and step == 3:
                raise Killed

        with Interrupt() as interrupt:
            monkeypatch.setattr(draft_training.Progress, "update", killed)
            with pytest.raises(Killed):
                trained_draft(job, interrupt)
            monkeypatch.setattr(draft_training.Progress, "update", original)
            assert not list(cache.glob("*/weights.npz"))
            capsys.readouterr()
            weights = trained_draft(job, interrupt)
            assert "going on at step 3 of 5" in capsys.readouterr().out
            first, reached = np.load(weights), json.loads(weights.with_name(ACCEPTANCE).read_text())
            assert [path.name for path in cache.glob("*.partial")] == ["0123456789abcdef.partial"]
            assert reached["responses"] == 4
            assert len(reached["acceptance"]) == draft_training.MIN_DEPTHS
            monkeypatch.setenv("JAXSPEC_CACHE", str(cache.with_name("another")))
            second = np.load(trained_draft(job, interrupt))
        assert all(np.array_equal(first[name], second[name]) for name in first.files)

    @pytest.mark.slow
    def test_a_text_replaces_the_samples_but_not_those_held_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "corpus.jsonl"
        path.write_text('{"text": "1+1=2"}\n{"text": "#"}\n')
        job = a_job(offline=OfflineConfig(samples=12, rows=4, steps=1, text=str(path)))
        trained, measured = [], []

        def remember_training(config: Any, step: Any, policy: Any, texts: Any, *_: Any) -> Any:
            trained.append(texts.rows)
            return tiny_network(eagle3, config.model)

        monkeypatch.setattr(draft, "train_draft", remember_training)
        monkeypatch.setattr(
            draft,
            "measure_acceptance",
            lambda *arguments: measured.append(arguments[-1]) or [0.5],
        )
        with Interrupt() as interrupt:
            trained_draft(job, interrupt)
            trained_draft(a_job(offline=OfflineConfig(samples=12, rows=4, steps=1)), interrupt)
        texts = [job.tokenizer.decode(row[mask]) for row, mask in zip(*trained[0], strict=True)]
        assert texts == ["1+1=2", "#"]
        assert len(trained[1].tokens) == 8
        assert same_bits(measured[0], measured[1])
        assert not any(
            np.array_equal(row, other)
            for row in measured[0][0].tokens
            for other in trained[1].tokens
        )

    def test_a_file_where_work_is_kept_on_the_way_is_replaced(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = a_job(offline=OfflineConfig(samples=8, rows=4, steps=1))
        monkeypatch.setattr(
            draft, "train_draft", lambda config, *_: tiny_network(eagle3, config.model)
        )
        monkeypatch.setattr(draft, "measure_acceptance", lambda *_: [0.5])
        cache.mkdir()
        key = draft._draft_key(job.config, job.step.learner.processing, None)
        (cache / f"{key}.partial").write_text("no folder")
        with Interrupt() as interrupt:
            assert trained_draft(job, interrupt).exists()
        assert not list(cache.glob("*.partial"))

    def test_the_code_that_shapes_what_is_kept_is_found_and_that_of_prompts_is_part_of_it(
        self,
    ) -> None:
        job = a_job()
        # every name matches a file
        assert all(
            [
                policy_key(job.config),
                draft._draft_key(job.config, job.step.learner.processing, None),
                round_cost._cost_key(job.step.generator, 6),
            ]
        )
        prompts = "data/problem_source data/messages data/json_lines data/problems tokens/turns"
        prompts += " tokens/chat_template tokens/template_process"
        prompts += " transfer step build"
        assert {f"{name}.py" for name in prompts.split()} <= set(draft.CODE_FILES)
        with pytest.raises(ValueError, match=r"nothing\*\.py"):
            read_sources("step.py", "nothing*.py")

    @pytest.mark.slow
    def test_responses_that_failed_are_neither_trained_on_nor_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Those to prompts with a seven, which no response may have; the policy's embedding of it
        is NaN."""
        seven = character_tokenizer().encode("7")[0]
        rollout = RolloutConfig(
            max_new_tokens=6,
            draft=DraftConfig(kind="model", model=DraftModelConfig(layers=4), draft_length=2),
            banned=(seven,),
        )
        job = a_job(rollout=rollout, offline=OfflineConfig(samples=24, rows=8, steps=2))
        policy = tiny_network(Decoder, job.config.model)
        policy = with_weights(policy, embedding=policy.embedding[...].at[seven].set(np.nan))
        monkeypatch.setattr(draft, "load_policy", lambda *_: policy)
        trained = []
        plain = draft.train_draft

        def remember(config: Any, step: Any, policy: Any, texts: Any, *rest: Any) -> Any:
            trained.append(texts.rows)
            return plain(config, step, policy, texts, *rest)

        monkeypatch.setattr(draft, "train_draft", remember)
        with Interrupt() as interrupt:
            weights = trained_draft(job, interrupt)
        assert all(
            np.isfinite(array).all() for name, array in np.load(weights).items() if name != "index"
        )
        reached = json.loads(weights.with_name(ACCEPTANCE).read_text())
        stream = load_sets(job.config, job.tokenizer).make_stream(0)
        good = (
            np.array([seven not in stream[number].ids for number in range(24)]).reshape(3, 8).sum(1)
        )
        assert (len(trained[0].tokens), reached["responses"]) == (good[:2].sum(), good[2])
        assert 0 < good[2] < 8
        assert f"{24 - good.sum()} of 24 responses failed" in capsys.readouterr().out
        assert not (trained[0].tokens == seven).any()
        assert all(0 < share < 1 for share in reached["acceptance"])

    def test_all_that_shapes_the_draft_names_its_entry_and_nothing_else_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = tmp_path / "corpus.jsonl"

        def build(*arguments: Any) -> None:
            (arguments[5] / "weights.npz").write_bytes(b"")

        monkeypatch.setattr(draft, "build_draft", build)

        def rollout(draft: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
            return {
                "rollout": RolloutConfig(
                    max_new_tokens=6,
                    draft=DraftConfig(**{"draft_length": 2, **(draft or {})}),
                    **changes,
                )
            }

        def offline(**changes: Any) -> dict[str, Any]:
            return {
                "offline": OfflineConfig(
                    **{"samples": 8, "rows": 4, "steps": 6, "learning_rate": 1e-2, **changes}
                )
            }

        def training(**changes: Any) -> dict[str, Any]:
            return {"draft_training": DraftTrainingConfig(**{"ttt_steps": 2, **changes})}

        shaping = [
            *(
                {"seed": 1},
                {"sft": SftConfig(steps=0, wrong_steps=0.1)},
                {"model": tiny_model(vocab=VOCAB, ffn=32, dtype="float32")},
            ),
            *(
                rollout({"kind": "mtp"}),
                rollout({"eagle3": Eagle3Config(vocab=12)}),
                rollout({"eagle3": Eagle3Config(ffn=8)}),
                rollout({"kind": "mtp", "mtp": MtpConfig(layers=2)}),
            ),
            *(
                rollout({"kind": "mtp", "mtp": MtpConfig(embedding_first=False)}),
                rollout(temperature=0.5),
                rollout(top_k=3),
                rollout(top_p=0.5),
            ),
            *(
                rollout(min_new_tokens=1),
                rollout(banned=(3,)),
                {"data": DataConfig(digits=1, max_prompt_length=6, task="subtract")},
            ),
            *(
                offline(samples=12),
                offline(steps=7),
                offline(rows=2),
                offline(learning_rate=1e-3),
                offline(text=str(text)),
            ),
            *(
                training(loss="lk"),
                training(ttt_steps=3),
                training(decay=0.5),
                training(grad_clip=1.0),
            ),
        ]
        free = [
            *(
                {"steps": 3},
                {"workdir": "elsewhere"},
                training(online=False),
                training(learning_rate=1.0),
            ),
            *(
                rollout({"draft_length": 3}),
                rollout({"sampling": "argmax"}),
                rollout(verify="token"),
            ),
        ]
        with Interrupt() as interrupt:

            def entry(**parts: Any) -> Path:
                return trained_draft(a_job(**parts), interrupt)

            text.write_text('{"text": "1"}\n')
            shaped = [entry(**parts) for parts in shaping]
            text.write_text('{"text": "2"}\n')
            shaped += [entry(), entry(**offline(text=str(text)))]
            assert len(set(shaped)) == len(shaped)
            assert {entry(**parts) for parts in free} == {entry()}

    @pytest.mark.slow
    def test_one_that_diverges_is_not_cached(self, cache: Path) -> None:
        job = a_job(offline=OfflineConfig(samples=8, rows=4, steps=9, learning_rate=1e30))
        with (
            Interrupt() as interrupt,
            pytest.raises(Diverged, match=r"draft's .* offline training.*--offline.learning_rate"),
        ):
            trained_draft(job, interrupt)
        assert not list(cache.glob("*/weights.npz"))
        assert not list(cache.glob("*.partial"))
