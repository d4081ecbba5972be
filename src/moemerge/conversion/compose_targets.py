"""The table of MoE families that dense models can be composed to, and the config of the result."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moemerge.errors import ArchitectureError, ConfigError
from moemerge.families.families import family_of
from moemerge.families.opened import OpenModel
from moemerge.families.rules import Family
from moemerge.forward.known_configs import fill_config, parameter_names
from moemerge.registry import did_you_mean

TOP_K = "num_experts_per_tok"  # config key in every family of the table
# Keys of a dense config that do not describe the result.
NOT_CARRIED = ("_name_or_path", "quantization_config", "transformers_version", "auto_map")
# Keys that differ between the filled configs of the dense model and the result.
_BLOCK = re.compile(r"\.(mlp|block_sparse_moe)\.")  # the part of a layer that is composed
_OWN = frozenset({"architectures", "model_type", "dtype", "torch_dtype", *NOT_CARRIED})


@dataclass(frozen=True)
class Shared:
    """The shared expert of a family; names are relative to the layer."""

    root: str
    gate: str | None = None  # a row whose sigmoid scales the expert
    width: str | None = None  # config key
    count: str | None = None  # config key of their number
    required: bool = False


@dataclass(frozen=True)
class MoeTarget:
    """A MoE family whose layers are those of a dense family, except for the MLP."""

    dense: tuple[str, ...]  # model types that it is composed of
    model_type: str
    class_name: str
    name: str  # in the config's `architecture:`
    count: str  # config key of the number of experts
    width: str | None = None  # config key of an expert's width, if not intermediate_size
    values: Mapping[str, Any] = field(default_factory=dict)  # further config values
    shared: Shared | None = None
    like: str | None = None  # a family with the same layout, if the table has no row of its own

    @property
    def family(self) -> Family:
        found = family_of(self.like or self.model_type)
        assert found is not None  # every target is in the family table
        return found

    def fits(self, *, shared: bool) -> bool:
        """Return whether a model with or without a shared expert can be composed."""
        if shared:
            return self.shared is not None
        return self.shared is None or not self.shared.required

    @property
    def notice(self) -> str | None:
        """A notice if transformers has no class for the result."""
        if "auto_map" not in self.values:
            return None
        return f"transformers loads {self.model_type} models only with trust_remote_code"

    def config(
        self, base: OpenModel, experts: int, top_k: int, width: int, *, shared: bool
    ) -> dict[str, Any]:
        """Return the config.json of the result.

        Defaults of the two config classes differ, so keys that the base leaves out are written.
        """
        # A dense config may still count the experts of a model that it was made of.
        dropped = {*NOT_CARRIED, *(target.count for target in TARGETS)}
        stored = {k: v for k, v in base.checkpoint.config.items() if k not in dropped}
        own = {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "tie_word_embeddings": base.architecture.tied,
            self.count: experts,
            TOP_K: top_k,
            **({} if self.width is None else {self.width: width}),
            **({self.shared.width: width} if self.shared and self.shared.width else {}),
            **({self.shared.count: 1} if shared and self.shared and self.shared.count else {}),
            **self.values,
        }
        dense, bare = fill_config(stored), fill_config({"model_type": self.model_type})
        assert dense is not None  # transformers has every dense family of the table
        if bare is None:
            return {**stored, **_plain_rope(base, dense), **own}
        missing = {
            name: value
            for name, value in dense.items()
            if name in bare and bare[name] != value and name not in {*stored, *own, *_OWN}
        }
        rope = missing.pop("rope_parameters", None)
        if "rope_theta" not in stored and isinstance(rope, dict):
            missing["rope_theta"] = rope.get("rope_theta")  # all versions of transformers read it
        config = {**stored, **missing, **own}
        made = fill_config(config)
        assert made is not None
        for key in sorted((dense.keys() & made.keys()) - own.keys() - _OWN):
            if (dense[key] or None) != (made[key] or None):  # null and 0 both mean: without it
                raise ArchitectureError(
                    f"{base.label}: {key} is {dense[key]!r:.80}, but {self.model_type} reads "
                    f"{made[key]!r:.80}",
                    hint="write this value into the base's config.json",
                )
        return config


_SUM_TO_ONE = {"norm_topk_prob": True}  # as the one MLP of a dense layer
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}

_DEEPSEEK = "deepseek-ai/deepseek-moe-16b-base--"  # whose code defines the family

TARGETS: tuple[MoeTarget, ...] = (
    MoeTarget(
        ("llama", "mistral"), "mixtral", "MixtralForCausalLM", "mixtral", "num_local_experts"
    ),
    MoeTarget(
        ("qwen2",),
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "qwen",
        "num_experts",
        width="moe_intermediate_size",
        values={**_SUM_TO_ONE, **_SPARSE},
        shared=Shared(
            "mlp.shared_expert",
            gate="mlp.shared_expert_gate.weight",
            width="shared_expert_intermediate_size",
            required=True,
        ),
    ),
    MoeTarget(
        ("qwen3",),
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3",
        "num_experts",
        width="moe_intermediate_size",
        values={**_SUM_TO_ONE, **_SPARSE},
    ),
    MoeTarget(
        ("olmo2",),
        "flex_olmo",
        "FlexOlmoForCausalLM",
        "flex_olmo",
        "num_experts",
        values=_SUM_TO_ONE,
    ),
    MoeTarget(
        ("llama", "mistral"),
        "deepseek",
        "DeepseekForCausalLM",
        "deepseek",
        "n_routed_experts",
        width="moe_intermediate_size",
        values={
            **_SUM_TO_ONE,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
            "scoring_func": "softmax",
            "auto_map": {
                "AutoConfig": f"{_DEEPSEEK}configuration_deepseek.DeepseekConfig",
                "AutoModel": f"{_DEEPSEEK}modeling_deepseek.DeepseekModel",
                "AutoModelForCausalLM": f"{_DEEPSEEK}modeling_deepseek.DeepseekForCausalLM",
            },
        },
        shared=Shared("mlp.shared_experts", count="n_shared_experts"),
        like="deepseek_v2",
    ),
)


def _plain_rope(base: OpenModel, dense: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary embeddings and heads for code that knows the plain ones only."""
    rope = dense.get("rope_parameters") or {}
    heads, hidden = dense["num_attention_heads"], dense["hidden_size"]
    unknown = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "head_dim": (dense.get("head_dim") or hidden // heads) * heads != hidden,
        "sliding_window": bool(dense.get("sliding_window")),
    }
    for key in (key for key, found in unknown.items() if found):
        raise ArchitectureError(f"{base.label}: DeepSeek-MoE's code does not support its {key}")
    names = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act")
    return {**{name: dense[name] for name in names}, "rope_theta": rope["rope_theta"]}


def target_for(base: OpenModel, name: str | None, *, shared: bool) -> MoeTarget:
    """Return the target for a dense base: the one of this name, or the first that fits."""
    model_type = base.architecture.model_type
    fitting = [target for target in TARGETS if model_type in target.dense]
    if not fitting:
        known = ", ".join(sorted({kind for target in TARGETS for kind in target.dense}))
        raise ArchitectureError(
            f"{base.label}: a MoE cannot be composed of {model_type or 'unknown'} models",
            hint=f"dense models: {known}",
        )
    names = [target.name for target in fitting]
    if name is not None:
        fitting = [target for target in fitting if name in (target.name, target.model_type)]
    if not fitting:
        raise ConfigError(
            f"architecture: {name!r} cannot be composed of {model_type} models"
            f"{did_you_mean(str(name), names)}",
            hint=f"for these models: {', '.join(names)}",
        )
    for target in fitting:
        if target.fits(shared=shared):
            return target
    what = "has no shared experts" if shared else "needs a shared expert"
    raise ConfigError(
        f"shared_experts: {fitting[0].model_type} {what}",
        hint="remove the key" if shared else "add one, such as the base with `residual_scale: 0.1`",
    )


def require_alike(base: OpenModel, experts: Sequence[OpenModel]) -> None:
    """Refuse experts with another number of layers or another activation than the base."""
    act = _activation(base)
    for expert in experts:
        layers = expert.architecture.num_layers
        if layers != base.architecture.num_layers:
            raise ArchitectureError(
                f"{expert.label} has {layers} layers, the base {base.label} has "
                f"{base.architecture.num_layers}",
                hint="experts are MLPs of models of the same size",
            )
        if _activation(expert) != act:
            raise ArchitectureError(
                f"the activation of {expert.label} is {_activation(expert)!r:.80}, that of the "
                f"base {base.label} is {act!r:.80}",
                hint="all experts of a layer have the same activation",
            )


def _activation(model: OpenModel) -> Any:
    text = model.architecture.text_config
    return text.get("hidden_act") or text.get("hidden_activation") or "silu"


def require_places(config: Mapping[str, Any], copied: Collection[str], label: str) -> None:
    """Refuse tensors of the base that the composed model does not have, or has in addition."""
    names = parameter_names(config)
    if names is None:
        return
    unplaced = sorted(name for name in copied if name not in names)
    inner = {name for name in names if _BLOCK.search(name)}
    lacking = sorted(names - inner - set(copied) - {"lm_head.weight"})
    if unplaced or lacking:
        words = f"has no place for {unplaced[0]}" if unplaced else f"also needs {lacking[0]}"
        raise ArchitectureError(
            f"{label}: {config['architectures'][0]} {words}",
            hint="its layers are not those of the MoE family",
        )
