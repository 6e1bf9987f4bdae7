"""Checks across sections of a config, and against the devices."""

import math
from typing import NamedTuple

from jaxspec.config.settings import SHARED_SETTINGS, DataConfig, ResolvedConfig, SetConfig
from jaxspec.drafts.kinds import get_kind
from jaxspec.inputs.checked import INT32, divisors, require
from jaxspec.rollout.pages import min_pool_size


class MeshShape(NamedTuple):
    """Devices along each axis of the mesh."""

    data: int
    tensor: int
    expert: int

    @property
    def row_shards(self) -> int:
        """Number of shards that rows are split over."""
        return self.data * self.expert


def check_config(config: ResolvedConfig, devices: int, processes: int = 1) -> MeshShape:
    """Checks combinations of settings, and resolves the mesh.

    `devices` counts those of all processes. `mesh.data` 0 becomes all shards of the devices, or in
    a single process as many as divide every batch.

    Raises:
      ConfigError: Numbers do not fit together. The message names them, and some that do.
    """
    require(
        devices % processes == 0,
        f"{processes} processes do not divide {devices} devices; give each process the same number",
    )
    tensor, expert = config.mesh.tensor, config.mesh.expert
    alternatives = _fitting_meshes(config, devices)
    sizes = (
        f"mesh.expert {expert} x mesh.tensor {tensor}" if expert > 1 else f"mesh.tensor {tensor}"
    )
    require(
        devices % (expert * tensor) == 0,
        f"{sizes} does not divide {devices} devices; {alternatives}",
    )
    _check_model_axes(config)
    shards = devices // (expert * tensor)
    # A batch that is not trained counts 0, which does not change the divisor.
    common_divisor = math.gcd(*_row_counts(config).values())
    max_shards = max(
        (size for size in range(1, shards + 1) if common_divisor % (size * expert) == 0), default=1
    )
    # Every process must take part, so with several no device is left idle.
    data = config.mesh.data or (shards if processes > 1 else max_shards)
    requested_mesh = (
        f"mesh.data {data} x {sizes} = {data * expert * tensor} devices, but there are {devices}"
    )
    require(
        # Also for one process: idle devices are accepted only if nothing was set.
        config.mesh.data in (0, shards),
        f"{requested_mesh}; {alternatives}, and --mesh.data 0 chooses by itself",
    )
    shape = MeshShape(data, tensor, expert)
    _check_rows(config, shape)
    _check_drafts(config)
    _check_positions(config)
    _check_micro_batch(config)
    _check_pool(config, config.batch.prompts // shape.row_shards)
    _check_sets(config)
    _check_evaluation(config)
    return shape


def _fitting_meshes(config: ResolvedConfig, devices: int) -> str:
    """Describes the meshes that fit the devices."""
    tensor, expert = config.mesh.tensor, config.mesh.expert
    # No size of `tensor` mends this, so only sizes of `expert` are listed.
    if devices % expert:
        experts = config.model.family.experts or 1
        remaining_devices = devices // tensor if devices % tensor == 0 else devices
        sizes = [size for size in divisors(remaining_devices) if experts % size == 0]
        return f"mesh.expert can be {', '.join(map(str, sizes))}"
    axes = ("data", "expert", "tensor") if expert > 1 else ("data", "tensor")
    shards = devices // expert
    sizes = [(shards // size, expert, size) for size in divisors(shards)]
    meshes = [" x ".join(map(str, size if expert > 1 else size[::2])) for size in sizes]
    axis_names = " x ".join(axes)
    return f"meshes ({axis_names}) that fit {devices} devices: {', '.join(meshes)}"


def _check_model_axes(config: ResolvedConfig) -> None:
    """Checks that mesh axes divide the model's axes."""
    tensor, expert = config.mesh.tensor, config.mesh.expert
    # The vocabulary is not checked, since rows of zeros pad it (`models/weight_layout.py`).
    # KV heads are not replicated over `tensor`.
    for name in ("heads", "kv_heads", "ffn"):
        size = getattr(config.model, name)
        require(
            size % tensor == 0,
            f"model.{name} {size} does not split over mesh.tensor {tensor}; change one of the two",
        )
    experts = config.model.family.experts
    require(
        expert == 1 or experts > 0,
        f"mesh.expert {expert} splits experts, and this model has none; leave it out, and see"
        " --mesh.data and --mesh.tensor",
    )
    require(
        not config.optimizer.freeze_router or experts > 0,
        "optimizer.freeze_router freezes routers of experts, but this model has none; leave it out",
    )
    valid_sizes = ", ".join(map(str, divisors(experts))) if experts else ""
    require(
        experts % expert == 0,
        f"model.family.experts {experts} do not split over mesh.expert {expert}; give one of"
        f" {valid_sizes}",
    )


def _check_rows(config: ResolvedConfig, shape: MeshShape) -> None:
    """Checks that the row shards divide every batch."""
    shard_count, prompts = shape.row_shards, config.batch.prompts
    shards = f"{shard_count} data shards"
    if shape.expert > 1:
        shards = f"{shape.data} data shards of {shape.expert} members each (mesh.expert)"
    groups = "a group is never split"
    require(
        prompts >= shard_count,
        f"batch.prompts {prompts} is fewer than {shards} ({groups}); raise it to {shard_count}"
        " or use fewer devices",
    )
    for key, count in _row_counts(config).items():
        nearest = max(count // shard_count, 1) * shard_count
        require(
            count % shard_count == 0,
            f"{key} {count} is not a multiple of {shards}; {nearest} or {nearest + shard_count}"
            " would fit",
        )


def _check_sets(config: ResolvedConfig) -> None:
    """Checks all sets of problems."""
    for prefix, sets in (("mixture", config.mixture), ("eval.sets", config.eval.sets)):
        for index, dataset in enumerate(sets):
            for section, names in SHARED_SETTINGS.items():
                _check_shared(f"{prefix}.{index}.{section}.", dataset, config, section, names)
    # The default cannot be told from a value that the user gave.
    default_count = DataConfig().eval_prompts
    for index, dataset in enumerate(config.eval.sets):
        is_limited = dataset.data.path and dataset.data.eval_prompts != default_count
        require(
            not dataset.data.eval_path and not is_limited,
            f"eval.sets.{index} has a data.eval_path or data.eval_prompts: all problems of its"
            " data.path are asked; leave them out",
        )
    _check_task(config)
    for prefix, dataset in config.sets_by_prefix.items():
        _check_verifier(prefix, dataset)


def _check_evaluation(config: ResolvedConfig) -> None:
    """Checks that responses of evaluations can end."""
    min_tokens, eval_tokens = config.eval.min_new_tokens, config.eval.max_new_tokens
    max_tokens = eval_tokens or config.rollout.max_new_tokens
    limit = f"{'eval' if eval_tokens else 'rollout'}.max_new_tokens {max_tokens}"
    require(
        min_tokens == "same" or min_tokens < max_tokens,
        f"eval.min_new_tokens {min_tokens} is not below {limit}; lower the first or raise the"
        " second",
    )


def _check_task(config: ResolvedConfig) -> None:
    """Checks that tasks share their characters, and have a corpus if needed."""
    uses_programs, is_text = config.data.task == "programs", config.sft.format == "text"
    corpora = {
        "sft.format text": config.sft.steps > 0 and is_text,
        "offline.text generic": _trains_offline(config) and config.offline.text == "generic",
    }
    for setting, is_used in corpora.items():
        require(
            not (uses_programs and is_used),
            f"{setting} is a corpus of arithmetic, and data.task is programs; leave it out",
        )
    for dataset in (*config.mixture, *config.eval.sets):
        require(
            bool(dataset.data.path) or (dataset.data.task == "programs") == uses_programs,
            f"the set {dataset.name} has data.task {dataset.data.task}, and the run data.task"
            f" {config.data.task}: programs have their own characters; give all sets programs, or"
            " none",
        )


def _check_shared(
    prefix: str, dataset: SetConfig, config: ResolvedConfig, section: str, names: tuple[str, ...]
) -> None:
    """Checks that a set does not change settings of the run."""
    set_section, run_section = getattr(dataset, section), getattr(config, section)
    for name in names:
        value, default = getattr(set_section, name), getattr(type(set_section)(), name)
        require(
            value in (default, getattr(run_section, name)),
            f"{prefix}{name} is {value!r} and {section}.{name} {getattr(run_section, name)!r},"
            " which all sets share; set only the latter",
        )


def _check_verifier(prefix: str, dataset: SetConfig) -> None:
    """Checks that answer style and verifier match."""
    data, reward = dataset.data, dataset.reward
    is_program = data.task == "programs"
    default_style = "code" if is_program else "hash"
    answer = "answer in a block of code" if is_program else "answer after `#`"
    require(
        bool(data.path) or data.answer_style == default_style,
        f"{prefix}data.answer_style {data.answer_style} without {prefix}data.path: generated tasks"
        f" {answer}: give --{prefix}data.path FILE.jsonl and --data.tokenizer FOLDER, or"
        f" --{prefix}data.answer_style {default_style}",
    )
    # A reward without this part never runs the verifier.
    checks_answer = "answer" in reward.all_parts
    require(
        not checks_answer or (reward.verifier == "code") == (data.answer_style == "code"),
        f"{prefix}data.answer_style is {data.answer_style} and {prefix}reward.verifier"
        f" {reward.verifier}: programs need `code` for both, and other answers for neither",
    )


def _check_micro_batch(config: ResolvedConfig) -> None:
    """Checks that the longest row fits a micro-batch."""
    # The last token of a row is predicted, but never read.
    longest = config.row_length - 1
    tokens = config.batch.micro_tokens
    message = (
        f"batch.micro_tokens {tokens} is less than the longest row reads: data.max_prompt_length +"
        f" rollout.max_new_tokens - 1 = {longest}"
    )
    require(
        tokens == 0 or tokens >= longest,
        f"{message}; give at least {longest}, or 0 to have it chosen",
    )


def require_countable(label: str, rows: int, positions: int) -> None:
    """Raises ConfigError if there are more tokens than int32 can count."""
    message = (
        f"{label} rows of {positions} positions are more than {INT32} tokens, the most that can be"
        " counted; lower one"
    )
    require(rows * positions <= INT32, message)


def _check_positions(config: ResolvedConfig) -> None:
    """Checks numbers of tokens and the longest row."""
    model = config.model
    prompt = config.data.max_prompt_length
    response = config.rollout.max_new_tokens
    batch = config.batch
    rows = {
        f"batch.prompts {batch.prompts} x batch.group_size {batch.group_size}": (
            batch.prompts * batch.group_size
        )
    }
    rows |= {f"{key} {count}": count for key, count in _row_counts(config).items()}
    if _trains_offline(config):
        rows[f"offline.samples {config.offline.samples}"] = config.offline.samples
    rows[f"rollout.lookup.past {config.rollout.past_answers} x batch.prompts {batch.prompts}"] = (
        config.rollout.past_answers * batch.prompts
    )
    for label, count in rows.items():
        require_countable(label, count, prompt + response)
    message = (
        f"data.max_prompt_length {prompt} and rollout.max_new_tokens {response} take up to"
        f" {prompt + response} positions"
    )
    min_factor = -(-(prompt + response) // max(model.max_positions, 1))
    remedy = (
        f"shorten them, or train with --model.rope_factor {min_factor}, which stretches the"
        " positions"
    )
    require(
        model.max_positions == 0 or prompt + response <= model.max_positions,
        f"{message}, and the model has {model.max_positions}; {remedy}",
    )


def _check_pool(config: ResolvedConfig, prompts: int) -> None:
    """Checks that the pages of a data shard suffice for its prompts and one row."""
    engine = config.rollout.engine
    # A round writes its whole block before it is verified, so the block needs pages.
    draft_length = config.rollout.draft.max_draft_length if config.rollout.draft.is_enabled else 0
    if not engine.pages or not isinstance(engine.page_size, int):
        return
    prompt, response = config.data.max_prompt_length, config.rollout.max_new_tokens
    min_pages = min_pool_size(prompts, prompt, response, draft_length, engine.page_size)
    needs = (
        f"{prompts} prompts of up to {prompt} tokens and one row of {prompt + response} (and a"
        f" block of {draft_length + 1}) need {min_pages}"
    )
    message = (
        f"rollout.engine.pages {engine.pages} of {engine.page_size} positions are too few for a"
        " data shard"
    )
    require(
        engine.pages >= min_pages,
        f"{message}: {needs}; set --rollout.engine.pages {min_pages} or more, or 0 for all that can"
        " be needed",
    )


def _check_drafts(config: ResolvedConfig) -> None:
    """Checks draft and look-up against policy and response."""
    rollout, draft, vocab = config.rollout, config.rollout.draft, config.model.vocab
    _check_text_lengths(config)
    auto_note = " (the longest of auto)" if draft.draft_length == "auto" else ""
    message = (
        f"rollout.draft.draft_length {draft.max_draft_length}{auto_note} and rollout.max_new_tokens"
        f" {rollout.max_new_tokens}"
    )
    # A round of K drafts commits up to K + 1 tokens.
    is_shorter = not draft.is_enabled or draft.max_draft_length < rollout.max_new_tokens
    require(
        is_shorter,
        f"{message}: a draft must be shorter than a response; lower the first or raise the second",
    )
    lookup_message = (
        f"rollout.lookup.beside {rollout.lookup.beside} needs a learned draft, and"
        f" rollout.draft.kind is {draft.kind}"
    )
    require(
        rollout.lookup.beside == "none" or draft.is_learned,
        f"{lookup_message}; choose eagle3, mtp or model, or that kind alone",
    )
    unknown_ids = [token for token in rollout.banned if not 0 <= token < vocab]
    require(
        not unknown_ids,
        f"rollout.banned has ids {unknown_ids}, which model.vocab {vocab} does not hold; leave"
        " them out",
    )
    learned = get_kind(draft.kind).learned
    if learned is not None:
        learned.check_spec(config.draft_spec)


def _check_text_lengths(config: ResolvedConfig) -> None:
    """Checks n-grams and training depths against the longest row."""
    rollout, lookup, training = config.rollout, config.rollout.lookup, config.draft_training
    longest = config.row_length
    row = f"the longest row, data.max_prompt_length + rollout.max_new_tokens = {longest}"
    match_fits = rollout.lookup_kind == "none" or lookup.max_match <= longest
    message = (
        f"rollout.lookup.max_match {lookup.max_match} (rollout.lookup.min_match {lookup.min_match})"
        f" is above {row}"
    )
    require(match_fits, f"{message}; lower it")
    is_trained = training.online or config.offline.steps > 0
    kind = get_kind(rollout.draft.kind)
    is_unrolled = is_trained and "draft_training.ttt_steps" in kind.shared_settings
    require(
        not is_unrolled or training.ttt_steps < longest,
        f"draft_training.ttt_steps {training.ttt_steps} is not below {row}; lower it",
    )


def _row_counts(config: ResolvedConfig) -> dict[str, int]:
    """Returns the prompts or rows of every batch by setting, 0 if nothing is trained."""
    sft = config.sft.steps and config.sft.rows
    offline = config.offline.rows if _trains_offline(config) else 0
    return {"batch.prompts": config.batch.prompts, "sft.rows": sft, "offline.rows": offline}


def _trains_offline(config: ResolvedConfig) -> bool:
    return config.offline.steps > 0 and config.rollout.draft.is_learned
