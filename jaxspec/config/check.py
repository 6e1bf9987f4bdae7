"""Whether a config goes together: its classes with one another, and with the devices there are."""

import math
from typing import NamedTuple

from jaxspec.config.settings import OF_THE_RUN, DataConfig, ResolvedConfig, SetConfig
from jaxspec.drafts.kinds import kind_of
from jaxspec.inputs.checked import INT32, divisors, require
from jaxspec.rollout.pages import smallest_pool


class MeshShape(NamedTuple):
    """Devices along each axis of the mesh."""

    data: int
    tensor: int
    expert: int

    @property
    def rows(self) -> int:
        """Into how many parts rows are split."""
        return self.data * self.expert


def check(config: ResolvedConfig, devices: int, processes: int = 1) -> MeshShape:
    """Checks what crosses classes and resolves the mesh for `devices` in all, over `processes`;
    `mesh.data` 0 becomes the most shards that fit the devices and every batch.

    Raises:
      ConfigError: names the numbers that do not go together, and some that do.
    """
    require(
        devices % processes == 0,
        f"{processes} processes do not divide {devices} devices; give each process the same number",
    )
    tensor, expert = config.mesh.tensor, config.mesh.expert
    fits = _fitting(config, devices)
    sizes = (
        f"mesh.expert {expert} x mesh.tensor {tensor}" if expert > 1 else f"mesh.tensor {tensor}"
    )
    require(devices % (expert * tensor) == 0, f"{sizes} does not divide {devices} devices; {fits}")
    _check_split(config)
    shards = devices // (expert * tensor)
    divided = math.gcd(*_rows(config).values())
    most = max((size for size in range(1, shards + 1) if divided % (size * expert) == 0), default=1)
    data = config.mesh.data or (shards if processes > 1 else most)
    asked = (
        f"mesh.data {data} x {sizes} = {data * expert * tensor} devices, but there are {devices}"
    )
    require(
        config.mesh.data in (0, shards), f"{asked}; {fits}, and --mesh.data 0 chooses by itself"
    )
    shape = MeshShape(data, tensor, expert)
    _check_rows(config, shape)
    _check_drafts(config)
    _check_positions(config)
    _check_micro_batch(config)
    _check_pool(config, config.batch.prompts // shape.rows)
    _check_sets(config)
    _check_evaluation(config)
    return shape


def _fitting(config: ResolvedConfig, devices: int) -> str:
    """The meshes of so many devices, in words."""
    tensor, expert = config.mesh.tensor, config.mesh.expert
    if devices % expert:
        experts = config.model.family.experts or 1
        left = devices // tensor if devices % tensor == 0 else devices
        sizes = [size for size in divisors(left) if experts % size == 0]
        return f"mesh.expert can be {', '.join(map(str, sizes))}"
    axes = ("data", "expert", "tensor") if expert > 1 else ("data", "tensor")
    shards = devices // expert
    sizes = [(shards // size, expert, size) for size in divisors(shards)]
    listed = [" x ".join(map(str, size if expert > 1 else size[::2])) for size in sizes]
    named = " x ".join(axes)
    return f"meshes ({named}) that fit {devices} devices: {', '.join(listed)}"


def _check_split(config: ResolvedConfig) -> None:
    """Whether the model's axes split over the mesh's."""
    tensor, expert = config.mesh.tensor, config.mesh.expert
    # rows of zeros make a vocabulary split (`models/weight_layout.py`)
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
        "optimizer.freeze_router keeps routers of experts, and this model has none; leave it out",
    )
    few = ", ".join(map(str, divisors(experts))) if experts else ""
    require(
        experts % expert == 0,
        f"model.family.experts {experts} do not split over mesh.expert {expert}; give one of {few}",
    )


def _check_rows(config: ResolvedConfig, shape: MeshShape) -> None:
    """Whether every batch splits over what splits rows."""
    parts, prompts = shape.rows, config.batch.prompts
    shards = f"{parts} data shards"
    if shape.expert > 1:
        shards = f"{shape.data} data shards of {shape.expert} members each (mesh.expert)"
    groups = "a group lives whole on one shard"
    require(
        prompts >= parts,
        f"batch.prompts {prompts} is fewer than {shards} ({groups}); raise it to {parts}"
        " or use fewer devices",
    )
    for key, count in _rows(config).items():
        near = max(count // parts, 1) * parts
        require(
            count % parts == 0,
            f"{key} {count} is not a multiple of {shards}; {near} or {near + parts} would fit",
        )


def _check_sets(config: ResolvedConfig) -> None:
    """Whether what is asked can be judged, in every set of problems."""
    for where, sets in (("mixture", config.mixture), ("eval.sets", config.eval.sets)):
        for number, each in enumerate(sets):
            for part, names in OF_THE_RUN.items():
                _check_shared(f"{where}.{number}.{part}.", each, config, part, names)
    every = DataConfig().eval_prompts
    for number, each in enumerate(config.eval.sets):
        limited = each.data.path and each.data.eval_prompts != every
        require(
            not each.data.eval_path and not limited,
            f"eval.sets.{number} has a data.eval_path or data.eval_prompts: all problems of its"
            " data.path are asked; leave them out",
        )
    _check_task(config)
    for where, each in config.judged_sets.items():
        _check_judged(where, each)


def _check_evaluation(config: ResolvedConfig) -> None:
    """Whether responses of evaluations can end."""
    least, own = config.eval.min_new_tokens, config.eval.max_new_tokens
    longest = own or config.rollout.max_new_tokens
    named = f"{'eval' if own else 'rollout'}.max_new_tokens {longest}"
    require(
        least == "same" or least < longest,
        f"eval.min_new_tokens {least} is not below {named}; lower the first or raise the second",
    )


def _check_task(config: ResolvedConfig) -> None:
    """Whether generated tasks are written in one set of characters, and there is a corpus of
    them."""
    programs, continued = config.data.task == "programs", config.sft.format == "text"
    corpora = {
        "sft.format text": config.sft.steps > 0 and continued,
        "offline.text generic": _trained_offline(config) and config.offline.text == "generic",
    }
    for setting, asked in corpora.items():
        require(
            not (programs and asked),
            f"{setting} is a corpus of arithmetic, and data.task is programs; leave it out",
        )
    for each in (*config.mixture, *config.eval.sets):
        require(
            bool(each.data.path) or (each.data.task == "programs") == programs,
            f"the set {each.name} has data.task {each.data.task}, and the run data.task"
            f" {config.data.task}: programs have characters of their own, so that all sets are of"
            " programs or none",
        )


def _check_shared(
    where: str, each: SetConfig, config: ResolvedConfig, part: str, names: tuple[str, ...]
) -> None:
    """Whether a set leaves to the run what is the run's."""
    own, run = getattr(each, part), getattr(config, part)
    for name in names:
        value, default = getattr(own, name), getattr(type(own)(), name)
        require(
            value in (default, getattr(run, name)),
            f"{where}{name} is {value!r} and {part}.{name} {getattr(run, name)!r}, which all sets"
            " share; set that one alone",
        )


def _check_judged(where: str, each: SetConfig) -> None:
    """Whether a set's answers stand where its verifier looks; `where` comes before its
    settings."""
    source, reward = each.data, each.reward
    programs = source.task == "programs"
    own = "code" if programs else "hash"
    answer = "answer in a block of code" if programs else "answer after `#`"
    require(
        bool(source.path) or source.answer_style == own,
        f"{where}data.answer_style {source.answer_style} without {where}data.path: generated tasks"
        f" {answer}: give --{where}data.path FILE.jsonl and --data.tokenizer FOLDER, or"
        f" --{where}data.answer_style {own}",
    )
    judged = "answer" in reward.all_parts
    require(
        not judged or (reward.verifier == "code") == (source.answer_style == "code"),
        f"{where}data.answer_style is {source.answer_style} and {where}reward.verifier"
        f" {reward.verifier}: programs need `code` for both, and other answers for neither",
    )


def _check_micro_batch(config: ResolvedConfig) -> None:
    """Whether the longest row fits a micro-batch."""
    longest = config.row_length - 1
    tokens = config.batch.micro_tokens
    row = (
        f"batch.micro_tokens {tokens} is less than the longest row reads: data.max_prompt_length +"
        f" rollout.max_new_tokens - 1 = {longest}"
    )
    require(
        tokens == 0 or tokens >= longest, f"{row}; give at least {longest}, or 0 to have it chosen"
    )


def require_countable(what: str, rows: int, positions: int) -> None:
    """Refuses more tokens than are counted and held at once."""
    many = (
        f"{what} rows of {positions} positions are more than {INT32}, which is as far as tokens are"
        " counted; lower one"
    )
    require(rows * positions <= INT32, many)


def _check_positions(config: ResolvedConfig) -> None:
    """Whether what is generated or trained on at once can be counted, and its longest row fits the
    positions of the policy."""
    model = config.model
    prompt = config.data.max_prompt_length
    response = config.rollout.max_new_tokens
    batch = config.batch
    rows = {
        f"batch.prompts {batch.prompts} x batch.group_size {batch.group_size}": (
            batch.prompts * batch.group_size
        )
    }
    rows |= {f"{key} {count}": count for key, count in _rows(config).items()}
    if _trained_offline(config):
        rows[f"offline.samples {config.offline.samples}"] = config.offline.samples
    rows[f"rollout.lookup.past {config.rollout.past} x batch.prompts {batch.prompts}"] = (
        config.rollout.past * batch.prompts
    )
    for what, count in rows.items():
        require_countable(what, count, prompt + response)
    longest = (
        f"data.max_prompt_length {prompt} and rollout.max_new_tokens {response} take up to"
        f" {prompt + response} positions"
    )
    enough = -(-(prompt + response) // max(model.positions, 1))
    remedy = (
        f"shorten them, or train with --model.rope_factor {enough}, which stretches the positions"
    )
    require(
        model.positions == 0 or prompt + response <= model.positions,
        f"{longest}, and the model has {model.positions}; {remedy}",
    )


def _check_pool(config: ResolvedConfig, prompts: int) -> None:
    """Whether the pages of a data shard with so many prompts are enough for one row."""
    engine = config.rollout.engine
    length = config.rollout.draft.max_draft_length if config.rollout.draft.drafts else 0
    if not engine.pages or not isinstance(engine.page_size, int):
        return
    prompt, response = config.data.max_prompt_length, config.rollout.max_new_tokens
    least = smallest_pool(prompts, prompt, response, length, engine.page_size)
    numbers = (
        f"{prompts} prompts of up to {prompt} tokens and one row of {prompt + response} (and a"
        f" block of {length + 1}) need {least}"
    )
    given = (
        f"rollout.engine.pages {engine.pages} of {engine.page_size} positions are too few for a"
        " data shard"
    )
    require(
        engine.pages >= least,
        f"{given}: {numbers}; set --rollout.engine.pages {least} or more, or 0 for all that can be"
        " needed",
    )


def _check_drafts(config: ResolvedConfig) -> None:
    """Whether draft and look-up fit the policy, the response and one another."""
    rollout, draft, vocab = config.rollout, config.rollout.draft, config.model.vocab
    _check_loops(config)
    auto = " (the longest of auto)" if draft.draft_length == "auto" else ""
    lengths = (
        f"rollout.draft.draft_length {draft.max_draft_length}{auto} and rollout.max_new_tokens"
        f" {rollout.max_new_tokens}"
    )
    shorter = not draft.drafts or draft.max_draft_length < rollout.max_new_tokens
    require(
        shorter,
        f"{lengths}: a draft must be shorter than a response; lower the first or raise the second",
    )
    beside = (
        f"rollout.lookup.beside {rollout.lookup.beside} needs a learned draft, and"
        f" rollout.draft.kind is {draft.kind}"
    )
    require(
        rollout.lookup.beside == "none" or draft.learned,
        f"{beside}; choose eagle3, mtp or model, or that kind alone",
    )
    outside = [token for token in rollout.banned if not 0 <= token < vocab]
    require(
        not outside,
        f"rollout.banned has ids {outside}, which model.vocab {vocab} does not hold; leave"
        " them out",
    )
    kind = kind_of(draft.kind)
    if kind.learned is not None:
        kind.learned.check(config.draft_spec)
    own = draft.own_vocab
    whole = own == 0 or "rollout.draft.vocab" in kind.settings
    require(
        whole,
        f"rollout.draft.vocab {own} is for eagle3 heads; {draft.kind} drafts share the"
        " policy's, so leave it 0",
    )
    fits = own <= vocab
    require(
        fits,
        f"rollout.draft.vocab {own} is larger than the policy's model.vocab {vocab}; at"
        " most that, or 0 for all of it",
    )
    chosen = own == 0 or config.offline.steps > 0 or bool(draft.path)
    remedy = "set --offline.steps 300 or so, or --rollout.draft.vocab 0"
    require(
        chosen,
        f"rollout.draft.vocab {own} is chosen by offline training, and offline.steps is 0;"
        f" {remedy}",
    )
    room = own == 0 or own > len(rollout.banned) + 8
    require(
        room,
        f"rollout.draft.vocab {own} leaves next to nothing beside {len(rollout.banned)}"
        " banned ids and the end tokens",
    )


def _check_loops(config: ResolvedConfig) -> None:
    """Whether runs that are compared, and depths that are trained, end within the longest row."""
    rollout, lookup, training = config.rollout, config.rollout.lookup, config.draft_training
    longest = config.row_length
    row = f"the longest row, data.max_prompt_length + rollout.max_new_tokens = {longest}"
    shorter = rollout.lookup_kind == "none" or lookup.max_match <= longest
    match = (
        f"rollout.lookup.max_match {lookup.max_match} (rollout.lookup.min_match {lookup.min_match})"
        f" is above {row}"
    )
    require(shorter, f"{match}; lower it")
    trained = training.online or config.offline.steps > 0
    unrolled = trained and "draft_training.ttt_steps" in kind_of(rollout.draft.kind).settings
    require(
        not unrolled or training.ttt_steps < longest,
        f"draft_training.ttt_steps {training.ttt_steps} is not below {row}; lower it",
    )


def _rows(config: ResolvedConfig) -> dict[str, int]:
    """What every batch of the run divides over the data shards; 0 where nothing is trained."""
    sft = config.sft.steps and config.sft.rows
    offline = config.offline.rows if _trained_offline(config) else 0
    return {"batch.prompts": config.batch.prompts, "sft.rows": sft, "offline.rows": offline}


def _trained_offline(config: ResolvedConfig) -> bool:
    return config.offline.steps > 0 and config.rollout.draft.learned
