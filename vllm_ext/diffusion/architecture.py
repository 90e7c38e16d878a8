"""What vLLM does differently for a diffusion model: our scheduler, our worker, and none of its caches.

A hook of vLLM's for an architecture, which it runs on the configuration before anything else looks at it, in every
process. A model of Llama's architecture may be a diffusion model or an ordinary one: its hook asks first, and passes
an ordinary one on to whatever hook was there before.
"""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig, ModelConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from forebay.diffusion.families import FAMILIES
from forebay.vllm_ext.diffusion import check
from forebay.vllm_ext.diffusion.config import ServingConfig, read_config
from forebay.vllm_ext.diffusion.engine import EngineSettings

SCHEDULER = "forebay.vllm_ext.diffusion.scheduler.DiffusionScheduler"
WORKER = "forebay.vllm_ext.diffusion.worker.DiffusionWorker"
MODEL = "forebay.vllm_ext.diffusion.model:DiffusionModel"
METRICS = "ForebayDiffusionMetrics"
SHARED = {"LlamaForCausalLM"}
"""Architectures that other models have, too."""
DEFAULTS = ("temperature", "top_p", "max_tokens")
"""Of a model's `generation_config.json`; others, such as top_k, would have every request refused."""


class DiffusionModelConfig(ModelConfig):
    """vLLM's, with other values where a client says nothing: greedy, and not until the model's last position."""

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """What requests start from."""
        found = {name: value for name, value in super().get_diff_sampling_param().items() if name in DEFAULTS}
        if self.generation_config in ("auto", "vllm"):  # with a folder, vLLM would take max_tokens for a limit
            found.setdefault("max_tokens", self.forebay_length)
        return {"temperature": 0.0, **found}


def is_diffusion(hf_config: Any) -> bool:
    """Whether a model of an architecture that others have, too, is a diffusion model."""
    return getattr(hf_config, "is_causal", True) is False and getattr(hf_config, "mask_token_id", None) is not None


class DiffusionArchitecture(VerifyAndUpdateConfig):
    """The hook of architectures that only diffusion models have."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Choose scheduler and worker.

        Raises:
            ValueError: something is asked of the engine that it cannot do with a diffusion model.
        """
        EngineSettings.of_vllm(vllm_config).check()
        _update(vllm_config, read_config(vllm_config.additional_config))


def _update(vllm_config: Any, server: ServingConfig) -> None:
    vllm_config.parallel_config.worker_cls = WORKER
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = SCHEDULER
    scheduler.async_scheduling = False
    scheduler.enable_chunked_prefill = False
    vllm_config.cache_config.enable_prefix_caching = False
    vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=METRICS, kv_role="kv_both")
    model = vllm_config.model_config
    model.logits_processors = [check.NAME]
    model.forebay_length = server.length
    model.__class__ = DiffusionModelConfig


def shared_hook(before: type[Any] | None) -> type[Any]:
    """A hook for an architecture that others have, too; theirs is `before`."""

    class SharedArchitecture(before or VerifyAndUpdateConfig):  # type: ignore[misc]
        """Ours for diffusion models, the one that was there before for all others."""

        forebay = True

        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            """Ask which it is."""
            if is_diffusion(vllm_config.model_config.hf_config):
                DiffusionArchitecture.verify_and_update_config(vllm_config)
            elif before is not None:
                before.verify_and_update_config(vllm_config)

        @classmethod
        def verify_and_update_model_config(cls, model_config: Any) -> None:
            """The same."""
            if before is not None and not is_diffusion(model_config.hf_config):
                before.verify_and_update_model_config(model_config)

    return SharedArchitecture


def register() -> None:
    """Put the hooks in their places, and tell vLLM of architectures that it does not know."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models import ModelRegistry

    if METRICS not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(METRICS, "forebay.vllm_ext.diffusion.metrics", "DiffusionMetrics")
    known = ModelRegistry.get_supported_archs()
    for name in (name for family in FAMILIES for name in family.architectures):
        before = MODELS_CONFIG_MAP.get(name)
        if name in SHARED:
            if not getattr(before, "forebay", False):
                MODELS_CONFIG_MAP[name] = shared_hook(before)
            continue
        MODELS_CONFIG_MAP[name] = DiffusionArchitecture
        if name not in known:
            ModelRegistry.register_model(name, MODEL)
