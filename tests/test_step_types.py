"""Types of arrays in the whole step of a model in bfloat16."""

import re

import jax
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.programs import abstract_arguments
from jaxspec.inputs.spec import FamilySpec
from tests.conftest import small_mesh, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.slow
def test_logits_and_router_scores_are_float32_in_the_whole_step() -> None:
    """In bfloat16: as rollout and learner compute them, of policy, draft and routers."""
    sizes = vocab, own, experts = 97, 53, 7  # nothing else has these sizes
    family = FamilySpec(model_type="qwen3_moe", experts=experts, experts_per_token=2)
    model = tiny_model(vocab=vocab, family=family, dtype="bfloat16", layers=2)
    config = tiny_config(model, DraftConfig(draft_length=2, eagle3=Eagle3Config(vocab=own)))
    step = build_step(config, small_mesh(), (1,), vocab)
    given = abstract_arguments(step, config.batch.prompts)
    text = jax.jit(step.train_step).lower(*given).as_text()
    products = set(re.findall(r"stablehlo.dot_general .*-> tensor<([\dx]+)x(\d+)x(\w+)>", text))
    # a result without an axis of positions is the gradient of a weight
    of_positions = {found for found in products if found[0] != str(model.embed)}
    for size in sizes:
        dtypes = {dtype for _, last, dtype in of_positions if last == str(size)}
        assert dtypes == {"f32"}, size
