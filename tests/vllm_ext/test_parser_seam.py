"""What the method `parser` stands on in vLLM. When one of these fails, vLLM has moved: read the message."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models import deepseek_v2, mixtral, olmoe, qwen2_moe, qwen3_moe
from vllm.model_executor.models.utils import AutoWeightsLoader

from forebay.vllm_ext.parser.config import ParserQuantConfig
from forebay.vllm_ext.parser.method import ParserMoEMethod
from forebay.vllm_ext.plugin import register

SIGNATURES: dict[Any, list[str]] = {
    QuantizationConfig.get_quant_method: ["self", "layer", "prefix"],
    QuantizationConfig.maybe_update_config: ["self", "model_name", "hf_config", "revision"],
    QuantizationConfig.get_checkpoint_weight_mapper: [],
    FusedMoEMethodBase.__init__: ["self", "moe"],
    FusedMoEMethodBase.create_weights: [
        "self",
        "layer",
        "num_experts",
        "hidden_size",
        "intermediate_size_per_partition",
        "params_dtype",
        "extra_weight_attrs",
    ],
    FusedMoEMethodBase.apply: [
        "self",
        "layer",
        "x",
        "topk_weights",
        "topk_ids",
        "shared_experts",
        "shared_experts_input",
    ],
    RoutedExperts.weight_loader: [
        "self",
        "param",
        "loaded_weight",
        "weight_name",
        "shard_id",
        "expert_id",
        "return_success",
    ],
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function: Any) -> None:
    found = list(inspect.signature(function).parameters)
    assert found == SIGNATURES[function], f"vLLM's {function.__qualname__} now takes {found}; adapt vllm_ext.parser"


def test_methods_we_override_exist() -> None:
    for ours, theirs in ((ParserQuantConfig, QuantizationConfig), (ParserMoEMethod, FusedMoEMethodBase)):
        names = [name for name in vars(ours) if not name.startswith("_")]
        missing = [name for name in names if not hasattr(theirs, name)]
        assert not missing, f"vLLM's {theirs.__name__} no longer has {missing}: what we override is never called"


def test_attributes_we_read() -> None:
    source = inspect.getsource(RoutedExperts.__init__)
    for name in ("layer_name", "moe_config", "activation", "apply_router_weight_on_input"):
        assert f"self.{name} =" in source, f"RoutedExperts no longer sets {name}"
    assert {"num_experts", "moe_parallel_config"} <= set(FusedMoEConfig.__dataclass_fields__)
    assert isinstance(FusedMoEConfig.tp_rank, property)
    assert {"tp_size", "tp_rank"} <= set(FusedMoEParallelConfig.__dataclass_fields__)
    assert {"parallel_config", "lora_config", "quant_config"} <= set(VllmConfig.__dataclass_fields__)


def test_every_family_loads_through_the_mapper() -> None:
    """Ours is applied by `AutoWeightsLoader`, before any model looks at a name."""
    assert "quant_config.get_checkpoint_weight_mapper()" in inspect.getsource(AutoWeightsLoader.load_weights)
    for model in (
        deepseek_v2.DeepseekV2ForCausalLM,
        mixtral.MixtralForCausalLM,
        olmoe.OlmoeForCausalLM,
        qwen2_moe.Qwen2MoeForCausalLM,
        qwen3_moe.Qwen3MoeForCausalLM,
    ):
        assert "AutoWeightsLoader(self" in inspect.getsource(model.load_weights), f"{model.__name__} loads otherwise"


def test_vllm_adds_up_the_ranks_and_runs_shared_experts_itself() -> None:
    assert "moe_kernel is not None" in inspect.getsource(MoERunner._fused_output_is_reduced.fget)
    assert "SharedExpertsOrder.NO_OVERLAP" in inspect.getsource(MoERunner._apply_quant_method)


def test_layers_are_finished_after_loading() -> None:
    assert "quant_method.process_weights_after_loading(module)" in inspect.getsource(process_weights_after_loading)


def test_registration_is_idempotent() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    register()
    register()
    assert QUANTIZATION_METHODS.count("parser") == 1
    assert get_quantization_config("parser") is ParserQuantConfig
