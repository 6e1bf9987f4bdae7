"""What crosses the classes of a config, and the mesh that follows from it."""

from dataclasses import replace

import pytest

from jaxspec.config.check import check_config
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    LookupConfig,
    MeshConfig,
    OfflineConfig,
    OptimizerConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.mtp.settings import MtpConfig
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec

WITH_EXPERTS = ModelSpec(family=FamilySpec(experts=8, experts_per_token=2))


class TestCheck:
    @pytest.mark.parametrize(
        ("mesh", "prompts", "devices", "shape"),
        [
            (MeshConfig(), 16, 1, (1, 1, 1)),
            (MeshConfig(), 16, 8, (8, 1, 1)),
            (MeshConfig(), 12, 8, (6, 1, 1)),
            (MeshConfig(), 7, 6, (1, 1, 1)),
            (MeshConfig(), 2, 8, (2, 1, 1)),
            (MeshConfig(tensor=2), 16, 8, (4, 2, 1)),
            (MeshConfig(data=4, tensor=2), 16, 8, (4, 2, 1)),
        ],
    )
    def test_resolves(
        self, mesh: MeshConfig, prompts: int, devices: int, shape: tuple[int, int, int]
    ) -> None:
        warm = {"sft": SftConfig(rows=96), "offline": OfflineConfig(rows=96)}
        assert (
            check_config(
                ResolvedConfig(mesh=mesh, batch=BatchConfig(prompts=prompts), **warm), devices
            )
            == shape
        )

    @pytest.mark.parametrize(
        ("mesh", "prompts", "shape"),
        [
            (MeshConfig(expert=4), 16, (2, 1, 4)),
            (MeshConfig(expert=2, tensor=2), 16, (2, 2, 2)),
            (MeshConfig(expert=2), 12, (3, 1, 2)),
            (MeshConfig(data=1, expert=8), 8, (1, 1, 8)),
        ],
    )
    def test_resolves_where_experts_are_split(
        self, mesh: MeshConfig, prompts: int, shape: tuple[int, int, int]
    ) -> None:
        warm = {"sft": SftConfig(rows=96), "offline": OfflineConfig(rows=96)}
        batch = BatchConfig(prompts=prompts)
        config = ResolvedConfig(mesh=mesh, batch=batch, model=WITH_EXPERTS, **warm)
        assert check_config(config, 8) == shape
        assert check_config(config, 8).row_shards == shape[0] * shape[2]

    @pytest.mark.parametrize(
        ("mesh", "devices", "sizes"),
        [
            (MeshConfig(expert=3), 8, (1, 2, 4, 8)),
            (MeshConfig(expert=3, tensor=2), 8, (1, 2, 4)),
            (MeshConfig(expert=2), 3, (1,)),
            (MeshConfig(expert=5), 12, (1, 2, 4)),
        ],
    )
    def test_sizes_of_an_axis_of_experts_that_are_named_fit(
        self, mesh: MeshConfig, devices: int, sizes: tuple[int, ...]
    ) -> None:
        config = ResolvedConfig(
            mesh=mesh,
            batch=BatchConfig(prompts=24),
            model=WITH_EXPERTS,
            sft=SftConfig(rows=96),
            offline=OfflineConfig(rows=96),
        )
        with pytest.raises(ConfigError) as error:
            check_config(config, devices)
        assert str(error.value).endswith(f"mesh.expert can be {', '.join(map(str, sizes))}")
        for size in sizes:
            check_config(replace(config, mesh=replace(mesh, expert=size)), devices)

    @pytest.mark.parametrize(
        ("config", "devices", "processes", "parts"),
        [
            (ResolvedConfig(), 6, 4, ["4 processes", "6 devices"]),
            (
                ResolvedConfig(mesh=MeshConfig(expert=3)),
                8,
                1,
                ["mesh.expert 3 x mesh.tensor 1", "8 devices", "mesh.expert can be 1"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(expert=2)),
                8,
                1,
                ["mesh.expert 2", "has none", "--mesh.data"],
            ),
            (
                ResolvedConfig(optimizer=OptimizerConfig(freeze_router=True)),
                1,
                1,
                ["optimizer.freeze_router", "has none"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(expert=16), model=WITH_EXPERTS),
                16,
                1,
                ["model.family.experts 8", "mesh.expert 16", "1, 2, 4, 8"],
            ),
            (
                ResolvedConfig(
                    mesh=MeshConfig(expert=4), model=WITH_EXPERTS, batch=BatchConfig(prompts=4)
                ),
                8,
                2,
                ["batch.prompts 4", "2 data shards of 4 members", "raise it to 8"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(tensor=3)),
                8,
                1,
                ["mesh.tensor 3", "8 devices", "8 x 1, 4 x 2, 2 x 4, 1 x 8"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(tensor=4)),
                8,
                1,
                ["model.kv_heads 2", "mesh.tensor 4"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(data=16)),
                8,
                1,
                ["mesh.data 16", "16 devices", "there are 8", "8 x 1"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(data=4)),
                8,
                1,
                ["mesh.data 4", "4 devices", "there are 8", "4 x 2"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(data=8), batch=BatchConfig(prompts=4)),
                8,
                1,
                ["batch.prompts 4 is fewer than 8 data shards"],
            ),
            (
                ResolvedConfig(mesh=MeshConfig(data=8), batch=BatchConfig(prompts=12)),
                8,
                1,
                ["batch.prompts 12", "8 data shards", "8 or 16 would fit"],
            ),
            (
                ResolvedConfig(batch=BatchConfig(prompts=6)),
                4,
                2,
                ["batch.prompts 6", "4 data shards"],
            ),
            (
                ResolvedConfig(sft=SftConfig(rows=20), mesh=MeshConfig(data=8)),
                8,
                1,
                ["sft.rows 20", "8 data shards", "16 or 24"],
            ),
            (
                ResolvedConfig(offline=OfflineConfig(rows=4), mesh=MeshConfig(data=8)),
                8,
                1,
                ["offline.rows 4", "8 data shards", "8 or 16"],
            ),
            (
                ResolvedConfig(
                    batch=BatchConfig(prompts=2_000_000_000),
                    sft=SftConfig(steps=0),
                    rollout=RolloutConfig(draft=DraftConfig(kind="none")),
                ),
                8,
                1,
                ["batch.prompts 2000000000 x batch.group_size 8 rows", "lower one"],
            ),
            (
                ResolvedConfig(batch=BatchConfig(micro_tokens=34)),
                1,
                1,
                ["batch.micro_tokens 34", "the longest row", "= 35", "at least 35", "or 0"],
            ),
            (
                ResolvedConfig(rollout=RolloutConfig(max_new_tokens=3)),
                1,
                1,
                ["draft_length 3", "max_new_tokens 3"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(max_new_tokens=5, draft=DraftConfig(draft_length="auto"))
                ),
                1,
                1,
                ["draft_length 5", "auto"],
            ),
            (
                ResolvedConfig(model=ModelSpec(layers=3)),
                1,
                1,
                ["model.layers is 3", "eagle3", "at least 4"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(draft=DraftConfig(eagle3=Eagle3Config(vocab=41)))
                ),
                1,
                1,
                ["rollout.draft.eagle3.vocab 41", "model.vocab 40"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(draft=DraftConfig(eagle3=Eagle3Config(vocab=8)))
                ),
                1,
                1,
                ["rollout.draft.eagle3.vocab 8"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(draft=DraftConfig(eagle3=Eagle3Config(vocab=20))),
                    offline=OfflineConfig(steps=0),
                ),
                1,
                1,
                [
                    "rollout.draft.eagle3.vocab 20",
                    "offline.steps is 0",
                    "--offline.steps 300",
                    "--rollout.draft.eagle3.vocab 0",
                ],
            ),
            (
                ResolvedConfig(rollout=RolloutConfig(banned=(3, 40))),
                1,
                1,
                ["rollout.banned", "[40]", "model.vocab 40"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(
                        draft=DraftConfig(kind="ngram"), lookup=LookupConfig(beside="history")
                    )
                ),
                1,
                1,
                ["rollout.lookup.beside history", "kind is ngram"],
            ),
            (
                ResolvedConfig(
                    rollout=RolloutConfig(draft=DraftConfig(kind="mtp", mtp=MtpConfig(layers=3))),
                    draft_training=DraftTrainingConfig(ttt_steps=2),
                ),
                1,
                1,
                ["draft_training.ttt_steps 2", "rollout.draft.mtp.layers 3"],
            ),
            (
                ResolvedConfig(head=HeadSpec(taps=(2, 13))),
                1,
                1,
                ["head.taps [2, 13] has [13]", "model.layers 12"],
            ),
            (
                ResolvedConfig(draft_model=ModelSpec(embed=32)),
                1,
                1,
                ["width is 32", "model.embed 64", "head.own_embedding"],
            ),
            (
                ResolvedConfig(
                    draft_model=ModelSpec(embed=32),
                    head=HeadSpec(use_taps=False, own_embedding=True),
                ),
                1,
                1,
                ["width is 32", "model.embed 64", "as wide"],
            ),
            (
                ResolvedConfig(
                    draft_model=ModelSpec(vocab=50),
                    rollout=RolloutConfig(draft=DraftConfig(kind="model")),
                ),
                1,
                1,
                ["vocabulary is 50", "model.vocab 40"],
            ),
            (
                ResolvedConfig(data=DataConfig(path="f", answer_style="code")),
                1,
                1,
                ["data.answer_style is code and reward.verifier exact", "`code` for both"],
            ),
            (
                ResolvedConfig(data=DataConfig(answer_style="boxed")),
                1,
                1,
                ["data.answer_style boxed", "--data.path"],
            ),
        ],
    )
    def test_refuses_with_numbers(
        self, config: ResolvedConfig, devices: int, processes: int, parts: list[str]
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            check_config(config, devices, processes)
        assert [part for part in parts if part not in str(caught.value)] == []

    def test_rows_that_no_program_uses_are_free(self) -> None:
        plain = RolloutConfig(draft=DraftConfig(kind="none"))
        assert check_config(
            ResolvedConfig(
                rollout=plain, offline=OfflineConfig(rows=3), sft=SftConfig(steps=0, rows=3)
            ),
            8,
        ) == (8, 1, 1)

    def test_a_loaded_draft_brings_its_vocabulary_and_width(self) -> None:
        rollout = RolloutConfig(draft=DraftConfig(eagle3=Eagle3Config(vocab=20), path="head"))
        wide, own = ModelSpec(embed=32), HeadSpec(own_embedding=True)
        assert check_config(
            ResolvedConfig(
                rollout=rollout, offline=OfflineConfig(steps=0), draft_model=wide, head=own
            ),
            1,
        ) == (1, 1, 1)
        for head in (HeadSpec(taps=(0, 2)), HeadSpec(use_taps=False)):
            assert check_config(ResolvedConfig(model=ModelSpec(layers=2), head=head), 1) == (
                1,
                1,
                1,
            )

    def test_other_drafts_take_shallow_policies(self) -> None:
        shallow = ResolvedConfig(
            model=ModelSpec(layers=1), rollout=RolloutConfig(draft=DraftConfig(kind="mtp"))
        )
        assert check_config(shallow, 1) == (1, 1, 1)
