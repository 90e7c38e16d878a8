"""The quantization method `parser`: what vLLM asks about a compressed checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

if TYPE_CHECKING:
    from forebay.compression.checkpoint import ParserConfig

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ParserQuantConfig(QuantizationConfig):
    """Routed experts of the compressed layers run compressed; everything else is as vLLM always does it."""

    def __init__(self, parser: ParserConfig) -> None:
        super().__init__()
        from forebay.vllm_ext.parser.report import LoadReport

        self.parser = parser
        self.report = LoadReport()
        self.checked = False

    def __repr__(self) -> str:
        return f"ParserQuantConfig(rho={self.parser.rho}, layers={self.parser.layers})"

    @classmethod
    def get_name(cls) -> str:
        """`quant_method` in `config.json`."""
        return "parser"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All that the kernels compute in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere: the kernels are built for sm_80 and later."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside `config.json`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ParserQuantConfig:
        """Read the checkpoint's `quantization_config`.

        Raises:
            CheckpointError: it is damaged, or of a later version.
        """
        from forebay.compression.checkpoint import parse_config

        return cls(parse_config(config))

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Names in the checkpoint to names that vLLM's loaders of experts understand: see `loading`."""
        from vllm.model_executor.models.utils import WeightsMapper

        from forebay.vllm_ext.parser.loading import RENAMED

        return WeightsMapper(orig_to_new_regex=RENAMED)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check what can be checked before any engine process is started.

        Raises:
            CheckpointError: a tensor of the compressed layers is missing, or names a unit that does not exist.
        """
        if (folder := Path(model_name)).is_dir():
            from forebay.vllm_ext.parser.loading import check_folder

            check_folder(folder, self.parser)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for the routed experts of compressed layers, vLLM's plain ones for other experts and for linears."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from forebay.vllm_ext.parser.method import ParserMoEMethod, check_engine

        if not self.checked:
            check_engine(self.parser)
            self.checked = True
        if isinstance(layer, RoutedExperts):
            found = LAYER.search(prefix)
            if found and int(found[1]) in self.parser.kept:
                return ParserMoEMethod(layer, self.parser, int(found[1]), self.report)
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
