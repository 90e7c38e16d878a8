"""Where vLLM's front end has a request checked before it reaches the engine: the hook of logits processors."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from forebay.diffusion.errors import DiffusionError
from forebay.vllm_ext.diffusion.request import check_params

NAME = "forebay.vllm_ext.diffusion.check:RequestCheck"


class RequestCheck(LogitsProcessorV1, LogitsProcessorV2):
    """Refuses requests with status 400. It processes no logits: forebay's worker never makes one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("diffusion models run in forebay's own worker")

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which is what vLLM asks for, with our line."""
        try:
            check_params(sampling_params)
        except DiffusionError as error:
            raise ValueError(str(error)) from None

    def apply(self, *_: Any, **__: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        """Never called."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Never called."""
