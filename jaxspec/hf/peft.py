"""PEFT's form of LoRA adapters, to and from ours: one matrix [r in] and one [out r] for each target
of each layer, and the adapter_config.json beside them."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import Keys, is_whole, named, shown
from jaxspec.inputs.spec import LoraConfig, ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import TARGETS, Adapted, Changes, axis_sizes, changed, chosen

READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "use_rslora",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
}
"""Keys of adapter_config.json that `merge_adapters` follows."""
WITHOUT_EFFECT = {
    *(
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "task_type",
        "runtime_config",
    ),
    *(
        "exclude_modules",
        "layers_pattern",
        "lora_dropout",
        "eva_config",
        "megatron_config",
        "megatron_core",
        "qalora_group_size",
    ),
}
"""Keys of an adapter's config that change nothing in what a finished adapter adds; any other must
be off."""
STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the checkpoint's own weights as they are."""
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,8})\.(\w+)\.(\w+)\.lora_([AB])\.weight"
)
Pairs = dict[tuple[str, int], dict[str, np.ndarray]]
"""Matrices A and B by target and layer."""
_SIMPLE = (
    "an expression has at most 500 characters, 3 groups and 3 repeats (*, +, ?, {), repeats no"
    " group, and looks neither ahead nor back"
)


def adapter_tensors(adapted: Adapted) -> dict[str, np.ndarray]:
    """The adapters by PEFT's names, in its layout."""
    tensors = {}
    for name in adapted.names:
        a, b = (np.asarray(getattr(adapted.adapters, f"{name}_{part}")[...]) for part in "ab")
        for layer in range(len(a)):
            key = f"base_model.model.{_module(layer, name)}"
            inwards, outwards = a[layer].reshape(-1, a.shape[-1]), b[layer].reshape(b.shape[1], -1)
            tensors[f"{key}.lora_A.weight"] = np.ascontiguousarray(inwards.T)
            tensors[f"{key}.lora_B.weight"] = np.ascontiguousarray(outwards.T)
    return tensors


def adapter_config(lora: LoraConfig, model: ModelSpec, base: str) -> dict[str, Any]:
    """The adapter_config.json that goes with `adapter_tensors`; `base` names the checkpoint that
    they are for."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(chosen(lora.targets, model, "lora.targets")),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def merge_adapters(
    network: Decoder, tensors: Mapping[str, np.ndarray], adapter_config: Mapping[str, Any]
) -> Decoder:
    """The decoder with PEFT's adapters added to its weights: W + scale * B A, with scale alpha / r,
    or alpha / sqrt(r) for rsLoRA.

    Raises:
      ConfigError: as `changes_of` does.
    """
    return changed(network, changes_of(network, tensors, adapter_config))


def changes_of(
    network: Decoder, tensors: Mapping[str, np.ndarray], adapter_config: Mapping[str, Any]
) -> Changes:
    """What PEFT's adapters add to the weights of a decoder, of which only the shapes are looked at.

    Raises:
      ConfigError: names the key, of the adapters or of their config, that cannot be followed.
    """
    _check(adapter_config)
    pairs = _pairs(network, tensors)
    _check_complete(network, pairs, adapter_config)
    changes: Changes = {}
    for name in dict.fromkeys(name for name, _ in pairs):
        depth, inputs, outputs = axis_sizes(network, name)
        matrices = {layer: pairs[name, layer] for layer in range(depth) if (name, layer) in pairs}
        rank = max(len(pair["A"]) for pair in matrices.values())
        dtype = getattr(network.layers, TARGETS[name].weight).dtype
        a = np.zeros((depth, *inputs, rank), dtype)
        b = np.zeros((depth, rank, *outputs), dtype)
        scale = np.zeros(depth, dtype)
        for layer, pair in matrices.items():
            size = len(pair["A"])
            scale[layer] = _scale(_module(layer, name), size, adapter_config)
            a[layer, ..., :size] = pair["A"].T.reshape(*inputs, size)
            b[layer, :size] = pair["B"].T.reshape(size, *outputs)
        changes[name] = a, b, scale
    return changes


def _module(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{TARGETS[name].module}.{name}"


def _check(config: Mapping[str, Any]) -> None:
    """Whether the adapters are plain LoRA."""
    kind, start = config.get("peft_type"), config.get("init_lora_weights", True)
    require(
        kind == "LORA", f"adapter_config.json: peft_type is {shown(kind)}; only LORA can be merged"
    )
    altered = (
        f"adapter_config.json: init_lora_weights is {shown(start)}, for which PEFT alters the"
        " checkpoint's own weights"
    )
    require(
        any(start is known or start == known for known in STARTS),
        f"{altered}; convert the adapters to plain LoRA with PEFT",
    )
    for key, value in config.items():
        off = not value or value == "none" or key in READ | WITHOUT_EFFECT | {"init_lora_weights"}
        set_to = f"adapter_config.json: {named(key)} is {shown(value)}"
        require(
            off,
            f"{set_to}, which cannot be merged; merge the adapters with PEFT and give that folder",
        )
    _check_types(Keys(config, "adapter_config.json"))


def _check_types(keys: Keys) -> None:
    """Whether the keys that are followed are of the types that PEFT gives them."""
    keys.whole("r")
    keys.number("lora_alpha")
    keys.flag("use_rslora", False)
    modules = keys.content.get("target_modules")
    if isinstance(modules, str):
        _compile(modules, f"{keys.source}: target_modules")
    else:
        keys.texts("target_modules")
    if not is_whole(keys.content.get("layers_to_transform")):
        keys.wholes("layers_to_transform")
    for ranks, part in ((True, keys.part("rank_pattern")), (False, keys.part("alpha_pattern"))):
        for expression in part.content:
            part.whole(expression) if ranks else part.number(expression)
            _compile(expression, part.source)
            simple = f"{part.source}: {shown(expression)} may take for ever to match; {_SIMPLE}"
            require(
                _is_simple(expression), f"{simple}: write it so, or name the modules one by one"
            )


def _compile(expression: str, source: str) -> None:
    """Whether an expression is one, as `_pattern` matches it."""
    try:
        re.compile(_whole(expression))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{source}: {shown(expression)} is no regular expression ({error}); correct it"
        ) from error


def _is_simple(expression: str) -> bool:
    """Whether the ways to match an expression are so few that trying all of them takes no time,
    whatever it says; `_SIMPLE` in code."""
    marks = re.sub(r"\\.|\[[^\]]*\]", "", expression).replace("(?:", "(")
    repeats = sum(map(marks.count, "*+?{"))
    return (
        len(expression) <= 500
        and marks.count("(") <= 3
        and repeats <= 3
        and not re.search(r"\)[*+{]|\(\?", marks)
    )


def _whole(expression: str) -> str:
    """PEFT's own expression for the end of a module's name."""
    return rf"(.*\.)?({expression})$"


def _pairs(network: Decoder, tensors: Mapping[str, np.ndarray]) -> Pairs:
    """The matrices, with their names and shapes checked."""
    pairs: Pairs = {}
    for name_of_tensor, tensor in tensors.items():
        found, key = _KEY.fullmatch(name_of_tensor), named(name_of_tensor)
        if found is None:
            raise ConfigError(
                f"adapter tensor {key}: not a LoRA matrix of a decoder layer, so it cannot be"
                " merged; merge it with PEFT"
            )
        layer, module, name, side = int(found[1]), *found.groups()[1:]
        chosen((name,), network.config, f"adapter tensor {key}")
        depth, inputs, outputs = axis_sizes(network, name)
        require(
            module == TARGETS[name].module,
            f"adapter tensor {key}: {name} is in {TARGETS[name].module}, not in {module}",
        )
        require(
            layer < depth,
            f"adapter tensor {key}: the model has {depth} layers; give adapters that were trained"
            " for it",
        )
        size = int(np.prod(inputs if side == "A" else outputs))
        fits = tensor.ndim == 2 and tensor.shape[side == "A"] == size
        wanted = f"[r, {size}]" if side == "A" else f"[{size}, r]"
        require(
            fits,
            f"adapter tensor {key} has shape {list(tensor.shape)}, and the model needs {wanted};"
            " give adapters trained for it",
        )
        pairs.setdefault((name, layer), {})[side] = tensor
    for (name, layer), pair in pairs.items():
        ranks = {side: pair[side].shape[side == "B"] for side in pair}
        both = len(ranks) == 2 and len(set(ranks.values())) == 1
        require(
            both,
            f"adapter of {_module(layer, name)}: lora_A and lora_B must both be there, of one rank;"
            f" ranks are {ranks}",
        )
    return pairs


def _check_complete(network: Decoder, pairs: Pairs, config: Mapping[str, Any]) -> None:
    """Whether all that the config names is there, at the rank that it says."""
    for (name, layer), pair in pairs.items():
        rank = _pattern(config.get("rank_pattern"), _module(layer, name), config.get("r"))
        same = (
            f"adapter_config.json: r is {rank} for {_module(layer, name)}, whose lora_A has rank"
            f" {len(pair['A'])}; correct one of them"
        )
        require(rank == len(pair["A"]), same)
    named, layers = config.get("target_modules"), config.get("layers_to_transform")
    require(bool(pairs), "the adapter file has no tensors; export the adapters again")
    if isinstance(named, str):  # a regular expression: what it matches is what the file has
        return
    if layers is None:
        layers = range(network.config.layers)
    elif isinstance(layers, int):
        layers = [layers]
    where = "adapter_config.json: target_modules"
    for name in named or ():
        (last,) = chosen((name.rpartition(".")[2],), network.config, where)
        absent = [_module(layer, last) for layer in layers if (last, layer) not in pairs]
        if "." in name:  # the full name of some layers' modules only
            absent = []
        require(
            not absent,
            f"adapter_config.json: target_modules has {shown(name)}, but the adapter file lacks"
            f" {', '.join(absent[:3])}",
        )


def _pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """What the first expression that matches the end of the module's name says; PEFT's own rule."""
    found = (value for key, value in (pattern or {}).items() if re.match(_whole(key), module))
    return next(found, default)


def _scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Factor on the product of the module's matrices."""
    alpha = _pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
