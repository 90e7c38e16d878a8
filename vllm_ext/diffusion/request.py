"""What a request may ask for, and what becomes of it for the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.errors import DiffusionError
from forebay.vllm_ext.diffusion.config import BlockCache, Remasking, ServingConfig, one_line

NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}
"""Values at which a parameter does nothing; anything else is refused."""
ABSENT = (
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
"""Parameters that may not be given at all."""


class RequestOptions(BaseModel):
    """What `vllm_xargs` (OpenAI API) and `SamplingParams.extra_args` may hold; what is left out, the server says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int | None = Field(None, ge=1)
    block: int | None = Field(None, ge=1)
    threshold: float | None = Field(None, gt=0, lt=1)
    remasking: Remasking | None = None
    block_cache: BlockCache | None = None
    refresh: int | None = Field(None, ge=0)
    adaptive: bool | None = None
    prefix: int | None = Field(None, ge=0)
    """Tokens of the prompt that other requests share; without it they are found."""
    exact: bool | None = None


def read_options(extra: Mapping[str, Any] | None) -> RequestOptions:
    """A request's own settings.

    Raises:
        DiffusionError: a key is unknown or a value wrong.
    """
    try:
        return RequestOptions.model_validate(dict(extra or {}))
    except ValidationError as error:
        raise DiffusionError(one_line(error, RequestOptions)) from None


def check_params(params: Any) -> None:
    """Refuse what a diffusion model cannot do, by name.

    Args:
        params: vLLM's `SamplingParams`.

    Raises:
        DiffusionError: with one line.
    """
    if _is_beam(params):
        raise DiffusionError("a diffusion model cannot do beam search: it has no next token; leave it out")
    given = [name for name, value in NEUTRAL.items() if getattr(params, name) != value]
    given += [name for name in ABSENT if getattr(params, name, None)]
    given += ["top_k"] if params.top_k > 0 and params.temperature > 0 else []
    if params.prompt_logprobs is not None and "prompt_logprobs" not in given:
        given.append("prompt_logprobs")
    if given:
        raise DiffusionError(f"a diffusion model does not support {given[0]}; leave it out")
    read_options(params.extra_args)


def _is_beam(params: Any) -> bool:
    """vLLM asks for the beams' next tokens by parameters that no client sends together."""
    return (
        params.max_tokens == 1
        and not params.detokenize
        and params.watermarking is False
        and (params.logprobs or 0) >= 2
        and params.logprobs % 2 == 0
    )


def make_settings(params: Any, server: ServingConfig, length: int, seed: int, vocabulary: int) -> DecodingSettings:
    """How the runtime makes an answer.

    Args:
        params: vLLM's `SamplingParams`.
        server: what holds where the request says nothing.
        length: tokens of the answer.
        seed: where the request has none.
        vocabulary: tokens that the model knows, for `logprobs=-1`.

    Raises:
        DiffusionError: a value is out of its range.
    """
    options = read_options(params.extra_args)
    found: dict[str, Any] = {
        name: getattr(server, name) if getattr(options, name) is None else getattr(options, name)
        for name in ("block", "threshold", "remasking", "block_cache", "refresh", "adaptive", "exact")
    }
    found["steps"] = options.steps or max(1, round(length / server.tokens_per_step))
    found["logprobs"] = vocabulary if params.logprobs == -1 else params.logprobs
    found["ignore_end"] = params.ignore_eos or params.min_tokens > 0
    return DecodingSettings(
        length=length,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=seed if params.seed is None else params.seed,
        **found,
    )
