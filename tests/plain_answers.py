"""What sampling from a run should print: answers by plain decoding, in the rounds of the coupled
rule."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.config.settings import DraftConfig, MeshConfig
from jaxspec.host.job import make_job
from jaxspec.models.decoder import Decoder
from jaxspec.state import Drafter, Prompts, RolloutWeights
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import answering_config, no_history, small_mesh, tiny_network

CONFIG = answering_config(verify="coupled")


def policy() -> Decoder:
    return tiny_network(Decoder, CONFIG.model, seed=3, scale=3.0)


def answers(
    *texts: str, seed: int = 0, temperature: float = 1.0, rows: int = 1
) -> list[list[list[int]]]:
    """Response ids of each row to each prompt of a session, by plain decoding in one piece, end
    token included."""
    plain = dataclasses.replace(
        CONFIG.rollout, temperature=temperature, draft=DraftConfig(kind="none")
    )
    data = dataclasses.replace(CONFIG.data, max_prompt_length=6)
    job = make_job(
        dataclasses.replace(CONFIG, rollout=plain, data=data, seed=seed, mesh=MeshConfig()),
        small_mesh(1, 1),
    )
    call = jax.jit(job.step.generator.make_variant(prompts=1, group_size=rows).generate)
    nothing = Drafter(network=None, factor_index=jnp.zeros((0,), jnp.int32))
    ready = RolloutWeights(target=policy(), drafter=nothing, version=jnp.int32(0))
    given = []
    for number, text in enumerate(texts):
        ids = character_tokenizer().encode_prompt(text)
        prompts = Prompts(
            tokens=jnp.asarray([ids + [0] * (6 - len(ids))], jnp.int32),
            lengths=jnp.asarray([len(ids)], jnp.int32),
            live=jnp.ones((1,), bool),
            stream=jnp.int32(3),
            batch=jnp.int32(number),
            **no_history(1),
        )
        rollout = jax.device_get(call(ready, prompts))
        given.append(
            [
                row[len(ids) : end].tolist()
                for row, end in zip(rollout.tokens, rollout.lengths, strict=True)
            ]
        )
    return given


def marked(pieces: list[tuple[list[int], int]]) -> str:
    """Text with brackets around what each round accepted."""
    decode, text = character_tokenizer().decode, ""
    for tokens, accepted in pieces:
        drafted = decode(tokens[:accepted])
        text += (f"[{drafted}]" if drafted else "") + decode(tokens[accepted:])
    return text


def cut(response: list[int], proposals) -> list[tuple[list[int], int]]:
    """Rounds of the coupled rule over a response that is known: `proposals(committed)` is compared
    token by token."""
    pieces, done = [], 0
    while done < len(response):
        rest = response[done:]
        drafted = proposals(response[:done])
        accepted = next(
            (
                place
                for place, token in enumerate(drafted)
                if place >= len(rest) or token != rest[place]
            ),
            len(drafted),
        )
        pieces.append((rest[: accepted + 1], accepted))
        done += min(accepted + 1, len(rest))
    return pieces


def plain(text: str) -> str:
    return text.replace("[", "").replace("]", "")
