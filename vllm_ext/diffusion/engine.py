"""What of the engine's settings a diffusion model cannot be served with. Imports no vLLM: see `plugin`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from forebay.diffusion.errors import DiffusionError

SHORT = {
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-tp": "--tensor-parallel-size",
    "-q": "--quantization",
}
WORKS = {"tensor_parallel_size", "load_format=safetensors"}


class EngineError(DiffusionError, ValueError):
    """An option of the engine does not work with a diffusion model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Those that matter, by the names of vLLM's options; all but the first do not work."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_lora: bool = False
    speculative_config: bool = False
    quantization: str = ""
    kv_transfer_config: bool = False
    kv_offloading_size: float | None = None
    kv_events_config: bool = False
    ec_transfer_config: bool = False
    enable_prompt_embeds: bool = False
    enable_sleep_mode: bool = False
    logits_processors: bool = False
    load_format: str = "auto"

    @classmethod
    def of_command_line(cls, arguments: Sequence[str]) -> EngineSettings:
        """From the options of `vllm serve`; what cannot be read is left to vLLM."""
        found: dict[str, Any] = {}
        for option, following in zip(arguments, [*arguments[1:], ""], strict=False):
            name, _, attached = option.partition("=")
            name = SHORT.get(name, name).replace("_", "-")
            for field in fields(cls):
                if name == f"--{field.name}".replace("_", "-"):
                    found[field.name] = _read(attached or following, field.default)
        return cls(**found)

    @classmethod
    def of_vllm(cls, config: Any) -> EngineSettings:
        """From vLLM's own configuration, where options may have come from a file or from Python."""
        parallel, model = config.parallel_config, config.model_config
        return cls(
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            enable_expert_parallel=parallel.enable_expert_parallel,
            enable_lora=config.lora_config is not None,
            speculative_config=config.speculative_config is not None,
            quantization=model.quantization or "",
            kv_transfer_config=config.kv_transfer_config is not None
            or config.cache_config.kv_offloading_size is not None,
            kv_events_config=config.kv_events_config is not None,
            ec_transfer_config=config.ec_transfer_config is not None,
            enable_prompt_embeds=model.enable_prompt_embeds,
            enable_sleep_mode=model.enable_sleep_mode,
            logits_processors=bool(model.logits_processors),
            load_format=str(config.load_config.load_format),
        )

    def check(self) -> None:
        """Refuse what does not work, before vLLM fails on it in its own words.

        Raises:
            EngineError: naming the option.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or {field.name, f"{field.name}={value}"} & WORKS:
                continue
            option = f"--{field.name.replace('_', '-')}"
            shown = option if isinstance(value, bool) else f"{option} {value}"
            raise EngineError(
                f"{shown} does not work with a diffusion model; leave it out (--tensor-parallel-size works)"
            )


def _read(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return True
    if isinstance(default, int):
        return int(text) if text.isdecimal() and int(text) > 0 else default
    return text
