"""Conversion of LoRA adapters in PEFT's format.

PEFT stores matrices A [r in] and B [out r] for each target of each layer, and
adapter_config.json.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import JsonObject, format_name, format_value, is_integer
from jaxspec.inputs.spec import LoraConfig, ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import (
    TARGETS,
    AdaptedDecoder,
    WeightChanges,
    add_changes,
    axis_sizes,
    choose_targets,
)

APPLIED_KEYS = {
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "use_rslora",
    "layers_to_transform",
    "rank_pattern",
    "alpha_pattern",
}
"""Keys of adapter_config.json that `merge_adapters` applies."""
INERT_KEYS = {
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
"""Keys of adapter_config.json without an effect on a trained adapter."""
# Other initializations, such as PiSSA, also change the checkpoint's weights.
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the checkpoint's weights unchanged."""
# Layer numbers have no leading zeros, so that no two names mean the same layer.
_TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,8})\.(\w+)\.(\w+)\.lora_([AB])\.weight"
)
MatrixPairs = dict[tuple[str, int], dict[str, np.ndarray]]
"""Matrices A and B by target and layer."""
_PATTERN_LIMITS = (
    "an expression has at most 500 characters, 3 groups and 3 repeats (*, +, ?, {), repeats no"
    " group, and looks neither ahead nor back"
)


def adapter_tensors(adapted: AdaptedDecoder) -> dict[str, np.ndarray]:
    """Returns the adapters in PEFT's names and layout."""
    tensors = {}
    for name in adapted.names:
        a, b = (np.asarray(getattr(adapted.adapters, f"{name}_{side}")[...]) for side in "ab")
        for layer in range(len(a)):
            key = f"base_model.model.{_module_name(layer, name)}"
            # PEFT merges the heads with their dimensions, and stores matrices as [out in].
            down, up = (a[layer].reshape(-1, a.shape[-1]), b[layer].reshape(b.shape[1], -1))
            tensors[f"{key}.lora_A.weight"] = np.ascontiguousarray(down.T)
            tensors[f"{key}.lora_B.weight"] = np.ascontiguousarray(up.T)
    return tensors


def adapter_config_json(lora: LoraConfig, model: ModelSpec, base_model: str) -> dict[str, Any]:
    """Returns the adapter_config.json for `adapter_tensors`.

    Args:
      lora: settings of the adapters.
      model: the policy.
      base_model: name of the checkpoint that the adapters belong to.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        # PEFT declares an integer, but reads a fraction, too.
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(choose_targets(lora.targets, model, "lora.targets")),
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
    """Merges PEFT's adapters into a decoder.

    Each weight W becomes W + scale * B A. The scale is alpha / r, or alpha / sqrt(r) for rsLoRA.

    Raises:
      ConfigError: as `adapter_changes` does.
    """
    return add_changes(network, adapter_changes(network, tensors, adapter_config))


def adapter_changes(
    network: Decoder, tensors: Mapping[str, np.ndarray], adapter_config: Mapping[str, Any]
) -> WeightChanges:
    """Converts PEFT's adapters to changes of a decoder's weights.

    Args:
      network: the decoder. Only its shapes and dtypes are used.
      tensors: tensors of the adapters, by name.
      adapter_config: content of adapter_config.json.

    Raises:
      ConfigError: a key of the config is not supported, or a tensor does not fit.
    """
    _check_adapter_config(adapter_config)
    pairs = _pair_matrices(network, tensors)
    _check_configured_adapters(network, pairs, adapter_config)
    changes: WeightChanges = {}
    for name in dict.fromkeys(name for name, _ in pairs):
        depth, inputs, outputs = axis_sizes(network, name)
        matrices = {layer: pairs[name, layer] for layer in range(depth) if (name, layer) in pairs}
        rank = max(len(pair["A"]) for pair in matrices.values())
        dtype = getattr(network.layers, TARGETS[name].weight).dtype
        # Layers are stacked. Zeros pad smaller ranks and layers without adapters, and add nothing.
        a = np.zeros((depth, *inputs, rank), dtype)
        b = np.zeros((depth, rank, *outputs), dtype)
        scale = np.zeros(depth, dtype)
        for layer, pair in matrices.items():
            size = len(pair["A"])
            scale[layer] = _adapter_scale(_module_name(layer, name), size, adapter_config)
            a[layer, ..., :size] = pair["A"].T.reshape(*inputs, size)
            b[layer, :size] = pair["B"].T.reshape(size, *outputs)
        changes[name] = a, b, scale
    return changes


def _module_name(layer: int, name: str) -> str:
    """Returns a target's module name in transformers."""
    return f"model.layers.{layer}.{TARGETS[name].module}.{name}"


def _check_adapter_config(config: Mapping[str, Any]) -> None:
    """Checks that the adapters are plain LoRA."""
    peft_type, init = config.get("peft_type"), config.get("init_lora_weights", True)
    require(
        peft_type == "LORA",
        f"adapter_config.json: peft_type is {format_value(peft_type)}; only LORA can be merged",
    )
    message = (
        f"adapter_config.json: init_lora_weights is {format_value(init)}, for which PEFT alters the"
        " checkpoint's own weights"
    )
    require(
        any(init is plain_init or init == plain_init for plain_init in PLAIN_INITS),
        f"{message}; convert the adapters to plain LoRA with PEFT",
    )
    for key, value in config.items():
        # PEFT writes every key of its version, so an unknown key is harmless if it is off.
        is_mergeable = (
            not value or value == "none" or key in APPLIED_KEYS | INERT_KEYS | {"init_lora_weights"}
        )
        statement = f"adapter_config.json: {format_name(key)} is {format_value(value)}"
        require(
            is_mergeable,
            f"{statement}, which cannot be merged; merge the adapters with PEFT and give that"
            " folder",
        )
    _check_key_types(JsonObject(config, "adapter_config.json"))


def _check_key_types(keys: JsonObject) -> None:
    """Checks the types of the applied keys."""
    keys.get_int("r")
    keys.get_float("lora_alpha")
    keys.get_bool("use_rslora", False)
    # PEFT accepts a list of names or one regular expression.
    modules = keys.content.get("target_modules")
    if isinstance(modules, str):
        _check_expression(modules, f"{keys.source}: target_modules")
    else:
        keys.get_strings("target_modules")
    if not is_integer(keys.content.get("layers_to_transform")):
        keys.get_ints("layers_to_transform")
    for is_rank, pattern_keys in (
        (True, keys.get_object("rank_pattern")),
        (False, keys.get_object("alpha_pattern")),
    ):
        for expression in pattern_keys.content:
            pattern_keys.get_int(expression) if is_rank else pattern_keys.get_float(expression)
            _check_expression(expression, pattern_keys.source)
            message = (
                f"{pattern_keys.source}: {format_value(expression)} may take for ever to match;"
                f" {_PATTERN_LIMITS}"
            )
            require(
                _is_simple_expression(expression),
                f"{message}: write it so, or name the modules one by one",
            )


def _check_expression(expression: str, source: str) -> None:
    """Checks that an expression compiles."""
    try:
        re.compile(_suffix_expression(expression))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{source}: {format_value(expression)} is no regular expression ({error}); correct it"
        ) from error


def _is_simple_expression(expression: str) -> bool:
    """Returns whether an expression is within `_PATTERN_LIMITS`."""
    # Backtracking may take exponential time, and a downloaded file could hang the run. Escapes and
    # character classes are dropped first, since their characters are no operators.
    operators = re.sub(r"\\.|\[[^\]]*\]", "", expression).replace("(?:", "(")
    repeat_count = sum(map(operators.count, "*+?{"))
    return (
        len(expression) <= 500
        and operators.count("(") <= 3
        and repeat_count <= 3
        and not re.search(r"\)[*+{]|\(\?", operators)
    )


def _suffix_expression(expression: str) -> str:
    """Returns PEFT's expression for module suffixes."""
    return rf"(.*\.)?({expression})$"


def _pair_matrices(network: Decoder, tensors: Mapping[str, np.ndarray]) -> MatrixPairs:
    """Pairs and checks matrices A and B."""
    pairs: MatrixPairs = {}
    for tensor_name, tensor in tensors.items():
        match, quoted_name = _TENSOR_NAME.fullmatch(tensor_name), format_name(tensor_name)
        if match is None:
            raise ConfigError(
                f"adapter tensor {quoted_name}: not a LoRA matrix of a decoder layer, so it cannot"
                " be merged; merge it with PEFT"
            )
        layer, module, name, side = int(match[1]), *match.groups()[1:]
        choose_targets((name,), network.config, f"adapter tensor {quoted_name}")
        depth, inputs, outputs = axis_sizes(network, name)
        require(
            module == TARGETS[name].module,
            f"adapter tensor {quoted_name}: {name} is in {TARGETS[name].module}, not in {module}",
        )
        require(
            layer < depth,
            f"adapter tensor {quoted_name}: the model has {depth} layers; give adapters that were"
            " trained for it",
        )
        size = int(np.prod(inputs if side == "A" else outputs))
        # A is [r in] and B is [out r].
        fits = tensor.ndim == 2 and tensor.shape[side == "A"] == size
        expected = f"[r, {size}]" if side == "A" else f"[{size}, r]"
        require(
            fits,
            f"adapter tensor {quoted_name} has shape {list(tensor.shape)}, and the model needs"
            f" {expected}; give adapters trained for it",
        )
        pairs.setdefault((name, layer), {})[side] = tensor
    for (name, layer), pair in pairs.items():
        ranks = {side: pair[side].shape[side == "B"] for side in pair}
        is_matched = len(ranks) == 2 and len(set(ranks.values())) == 1
        require(
            is_matched,
            f"adapter of {_module_name(layer, name)}: lora_A and lora_B must both be there, of one"
            f" rank; ranks are {ranks}",
        )
    return pairs


def _check_configured_adapters(
    network: Decoder, pairs: MatrixPairs, config: Mapping[str, Any]
) -> None:
    """Checks that adapters have the configured ranks, and that none is missing."""
    for (name, layer), pair in pairs.items():
        rank = _lookup_pattern(
            config.get("rank_pattern"), _module_name(layer, name), config.get("r")
        )
        message = (
            f"adapter_config.json: r is {rank} for {_module_name(layer, name)}, whose lora_A has"
            f" rank {len(pair['A'])}; correct one of them"
        )
        require(rank == len(pair["A"]), message)
    modules, layers = config.get("target_modules"), config.get("layers_to_transform")
    require(bool(pairs), "the adapter file has no tensors; export the adapters again")
    # With a regular expression, the modules in the file are taken as its matches.
    if isinstance(modules, str):
        return
    if layers is None:
        layers = range(network.config.layers)
    elif isinstance(layers, int):
        layers = [layers]
    source = "adapter_config.json: target_modules"
    for name in modules or ():
        (target,) = choose_targets((name.rpartition(".")[2],), network.config, source)
        missing = [_module_name(layer, target) for layer in layers if (target, layer) not in pairs]
        # A name with dots may stand for the modules of some layers only.
        if "." in name:
            missing = []
        require(
            not missing,
            f"adapter_config.json: target_modules has {format_value(name)}, but the adapter file"
            f" lacks {', '.join(missing[:3])}",
        )


def _lookup_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first matching expression, or `default`."""
    # As in PEFT, an expression must match the end of the name.
    matches = (
        value for key, value in (pattern or {}).items() if re.match(_suffix_expression(key), module)
    )
    return next(matches, default)


def _adapter_scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Returns the factor on the product B A of a module."""
    alpha = _lookup_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
