"""How vLLM runs the routed experts of a compressed layer."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

import forebay.kernels.parser_moe.ops  # noqa: F401  registers torch.ops.forebay.parser_moe
from forebay.compression.checkpoint import ParserConfig
from forebay.compression.sharding import EngineError
from forebay.storage.huge_pages import collapse
from forebay.vllm_ext.parser.engine import EngineSettings
from forebay.vllm_ext.parser.loading import LayerLoader, parameter_dtype, parameters
from forebay.vllm_ext.parser.report import LoadReport

ACTIVATION = "silu"


def check_engine(parser: ParserConfig) -> None:
    """Refuse what compressed experts cannot do; `vllm serve` has asked before: see `plugin`.

    Raises:
        EngineError: naming the option.
    """
    config = get_current_vllm_config()
    parallel = config.parallel_config
    EngineSettings(
        tensor_parallel=parallel.tensor_parallel_size,
        data_parallel=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
        balance_experts=parallel.enable_eplb,
        adapters=config.lora_config is not None,
        load_format=str(config.load_config.load_format),
    ).check(parser)


class ParserMoEMethod(FusedMoEMethodBase):
    """Backbone once per token, residuals per token and expert (PARSER, arXiv 2609.00575).

    Raises:
        EngineError: the model asks for what the kernels do not compute.
    """

    def __init__(self, layer: Any, parser: ParserConfig, number: int, report: LoadReport) -> None:
        super().__init__(layer.moe_config)
        self.parser = parser
        self.parameters = parameters(parser)
        self.number = number
        self.report = report
        self.loader = LayerLoader(layer.layer_name, number, parser)
        self.complete = False
        report.created += 1
        self._check(layer)

    def _check(self, layer: Any) -> None:
        found = {layer.activation.value, self.parser.activation}
        if found != {ACTIVATION}:
            raise EngineError(f"activation {(found - {ACTIVATION}).pop()!r} is not computed, only {ACTIVATION!r} is")
        if layer.apply_router_weight_on_input:
            raise EngineError("router weights applied to the experts' input are not computed, only to their output")
        if layer.moe_config.num_experts != self.parser.experts:
            raise EngineError(
                f"the model has {layer.moe_config.num_experts} experts, quantization_config {self.parser.experts}"
            )

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **options: Any) -> None:
        """Register one parameter for each tensor, empty until all of them are there."""
        for parameter, name in self.parameters.items():
            dtype = parameter_dtype(name, self.parser, params_dtype)
            empty = Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            empty.weight_loader = partial(self._load, layer, parameter)
            layer.register_parameter(parameter, empty)

    def _load(self, layer: Any, name: str, param: Parameter, loaded_weight: Tensor, *_: Any, **__: Any) -> bool:
        if self.loader.add(self.parameters[name], loaded_weight):
            self._finish(layer)
        return True

    def _finish(self, layer: Any) -> None:
        weights = self.loader.finish(self.moe.tp_rank, self.moe.tp_size)
        values = [getattr(weights, field.name) for field in fields(weights)]
        for parameter, value in zip(self.parameters, values, strict=False):
            target = getattr(layer, parameter)
            # A copy, or on a CPU the parameter could be the mapped file.
            target.data = torch.empty(value.shape, dtype=target.dtype, device=target.device).copy_(value)
        self.complete = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Say what was loaded, and move it onto huge pages where the host's memory has them.

        Raises:
            CheckpointError: a tensor of the layer never came.
        """
        if not self.complete:
            self._finish(layer)
        weights = [getattr(layer, parameter) for parameter in self.parameters]
        kernel = "Triton" if weights[0].is_cuda else "CPU kernel"
        if not weights[0].is_cuda:
            for weight in weights:
                collapse(weight.data_ptr(), weight.nbytes)
        backbone, residual = weights[0], weights[3]
        if backbone.dtype is torch.int8:
            kernel += ", int8 backbone"
        dense = 3 * self.parser.experts * backbone.numel() * residual.element_size()
        self.report.add(sum(weight.nbytes for weight in weights), dense, kernel)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: none of vLLM's own kernels runs."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """What this rank adds to the routed experts' output, (T, D); vLLM sums over the ranks."""
        weights = [getattr(layer, parameter) for parameter in self.parameters]
        return torch.ops.forebay.parser_moe(x, topk_weights, topk_ids, *weights[:8], ACTIVATION, *weights[8:])
