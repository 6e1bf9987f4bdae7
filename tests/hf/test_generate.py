"""The engine on imported policies: greedy tokens are those of transformers, and those of a long
coupled rollout of plain decoding."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.drafts.lookup.drafting import ngram_draft, prefer_lookup
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from jaxspec.sampling import Processing
from jaxspec.state import EOS, LENGTH, Prompts
from tests.conftest import eagle3, no_history, tiny_network
from tests.hf_checkpoints import load, make
from tests.rollout.harness import assert_same_rows, compiled

pytest.importorskip("transformers")
pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("x64")]

NEW, NEVER = 24, 99
LENGTHS = (3, 9, 20, 13)
"""Of the prompts: one is longer than what the stretched cases were made for (16), and all texts
become longer than that."""


def prompts_of(lengths: tuple[int, ...], vocab: int = 37) -> Prompts:
    tokens = (
        np.random.default_rng(7).integers(2, vocab, (len(lengths), max(lengths))).astype(np.int32)
    )
    return Prompts(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths, jnp.int32),
        live=jnp.ones(len(lengths), bool),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
        **no_history(len(lengths)),
    )


def theirs(model: Any, prompt: np.ndarray, end: int) -> tuple[list[int], float]:
    """transformers' greedy response, and the smallest distance of the largest logit from the second
    largest on the way."""
    import torch

    said = model.generate(
        torch.tensor(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=end,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(said.logits).topk(2, dim=-1).values
    return said.sequences[0, len(prompt) :].tolist(), float((best[..., 0] - best[..., 1]).min())


def cut(response: list[int], end: int) -> list[int]:
    return response[: response.index(end) + 1] if end in response else response


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-tied-biases", "qwen3-moe", "qwen2", "llama3"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Through blocks of 4 tokens with a cache: drafts by look-up, which are often kept, or else of
    a random head, which seldom are.

    Both in float64; transformers' norms and rotations stay in float32, so no choice may be as near
    a tie as 1e-4. The end token is the one that some response reaches latest.
    """
    model, prompts = make(name, tmp_path).double(), prompts_of(LENGTHS)
    model.set_experts_implementation("eager")  # the others are for narrower types
    rows = [np.asarray(row[:length]) for row, length in zip(prompts.tokens, LENGTHS, strict=True)]
    endless = [theirs(model, row, NEVER)[0] for row in rows]
    end = max(
        {token for response in endless for token in response},
        key=lambda token: sum(len(cut(each, token)) for each in endless),
    )
    policy = load(tmp_path, dtype="float64")
    draft = prefer_lookup(ngram_draft(3, "vllm", 1, 3), recurrent_draft(3, (1, 2, 3)))
    settings = Settings(1, NEW, Processing(stop_ids=(end,), temperature=0.0), Matching())
    found = compiled(draft, settings)((policy, tiny_network(eagle3, policy.config, 2)), prompts)
    for row, length in enumerate(LENGTHS):
        wanted, gap = theirs(model, rows[row], end)
        assert gap > 1e-4
        assert found.tokens[row, length : found.lengths[row]].tolist() == wanted
    assert set(found.status.tolist()) == {EOS, LENGTH}
    kept = found.lengths - found.prompt_lengths
    assert found.statistics.accepted.sum() > 5  # several tokens of a block are kept
    assert (found.statistics.rounds < kept).any()
    # and others are overwritten
    assert found.statistics.accepted[:, 0].sum() < found.statistics.draft_rounds[:, 0].sum()


@pytest.mark.slow
def test_a_thousand_coupled_tokens_are_those_of_plain_decoding(tmp_path: Path) -> None:
    """With a head of three drafts a round, in every bit."""
    make("qwen3", tmp_path, max_position_embeddings=2048)
    policy, prompts = load(tmp_path, dtype="float64"), prompts_of((3, 7))
    settings = Settings(2, 1000, Processing(), Matching())
    plain = compiled(PLAIN, settings)((policy, None), prompts)
    found = compiled(recurrent_draft(3, (1, 2, 3)), settings)(
        (policy, tiny_network(eagle3, policy.config, 2)), prompts
    )
    assert (plain.lengths - plain.prompt_lengths).tolist() == [1000] * 4
    assert_same_rows(found, plain)
    assert len({tuple(row[7:].tolist()) for row in found.tokens}) == 4
    assert found.statistics.rounds.max() < 950  # drafts are kept all along
