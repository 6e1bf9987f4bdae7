"""The state of a rollout has one shape, whatever the settings: every part is always there."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import ROWS
from jaxspec.models.weight_layout import WeightLayout, apply_layout
from jaxspec.rollout.decode_state import (
    DecodeState,
    pages_may_run_out,
    row_specs,
    rows_may_wait,
)
from jaxspec.rollout.generate import begin
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from tests.rollout.harness import (
    GROUP,
    NEW,
    SPREAD,
    coupled_prompts,
    draft_of,
    drafter,
    network_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")

BASE = Settings(GROUP, NEW, SPREAD, Matching())
SETTINGS = {
    "a slot for each row": BASE,
    "rows wait": BASE._replace(slots=5),
    "pages for all": BASE._replace(slots=5, page_size=2),
    "pages that run out": BASE._replace(slots=5, page_size=2, pages=34),
    "chosen lengths": BASE._replace(lengths=(0, 1, 3)),
}


STACKED, UNROLLED = WeightLayout(), WeightLayout(fused=True, unrolled=True)


def begun(settings: Settings, layout: WeightLayout = STACKED) -> DecodeState:
    target = apply_layout(plain()[0], layout)
    draft, network = draft_of("eagle3", 3), network_of("eagle3", 0.8)
    given = drafter(network, draft, lengths=settings.lengths)
    return jax.eval_shape(
        lambda prompts: begin(
            target, given, draft, prompts, jnp.int32(0), jax.random.key(5), settings
        ),
        coupled_prompts(),
    )


def test_every_part_is_always_there() -> None:
    states = {name: begun(settings) for name, settings in SETTINGS.items()}
    parts = {
        name: [(jax.tree_util.keystr(path), leaf.ndim, leaf.dtype) for path, leaf in leaves]
        for name, state in states.items()
        for leaves in [jax.tree_util.tree_leaves_with_path(state)]
    }
    assert len({str(part) for part in parts.values()}) == 1
    assert [rows_may_wait(state) for state in states.values()] == [False, True, True, True, False]
    assert [pages_may_run_out(state, NEW) for state in states.values()] == [
        *[False] * 3,
        True,
        False,
    ]


@pytest.mark.parametrize("name", ["a slot for each row", "pages for all"])
def test_pages_are_split_after_the_layers_and_all_else_by_its_first_axis(name: str) -> None:
    """By what a cache says of itself: no other state of five axes is taken for one."""
    for layout, pages in ((STACKED, P(None, ROWS)), (UNROLLED, P(ROWS))):
        state = begun(SETTINGS[name], layout)
        deep = {"draft": jax.ShapeDtypeStruct((8, 1, 1, 1, 1), "float32")}
        specs = row_specs(state.replace(**deep))
        assert {*jax.tree.leaves(specs.caches.target.keys)} == {pages}
        assert {*jax.tree.leaves(specs.caches.target.values)} == {pages}
        rest = specs.replace(caches=specs.caches.draft, queue=None)
        assert {*jax.tree.leaves(rest)} == {P(ROWS)}, "the draft's layers are not stacked"
