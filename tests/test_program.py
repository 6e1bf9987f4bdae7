"""What a job opens once for all programs: the tokenizer as the config wants it, and a step that knows it."""

from dataclasses import replace
from pathlib import Path

from jaxspec.config import DataConfig, RolloutConfig, SftConfig
from jaxspec.program import make_job
from jaxspec.tokenizer import character_tokenizer
from tests.conftest import small_mesh, tiny_config, tiny_model


def test_the_tokenizers_size_ends_and_template_reach_the_step_and_the_prompts(tmp_path: Path) -> None:
    """A vocabulary of 32 rows for 21 tokens: the other 11 are never sampled."""
    character_tokenizer().save(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ 1 if enable_thinking else 0 }}{{ messages[0].content }}")
    data = DataConfig(tokenizer=str(tmp_path))
    config = tiny_config(tiny_model(vocab=32), rollout=RolloutConfig(banned=(7,)), data=data, sft=SftConfig(steps=0))
    job = make_job(config, small_mesh())
    processing = job.step.settings.processing
    assert (processing.known, processing.stop_ids, processing.banned) == (character_tokenizer().size, (1,), (7,))
    assert job.tokenizer.render("+2") == "1+2"
    told = replace(config, rollout=RolloutConfig(enable_thinking=False))
    assert make_job(told, small_mesh()).tokenizer.render("+2") == "0+2"
