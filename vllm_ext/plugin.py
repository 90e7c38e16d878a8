"""Entry point of the group `vllm.general_plugins`: makes forebay's names known to vLLM.

Runs in every vLLM process, possibly more than once; registers only what is missing and imports nothing heavy.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the connector `ForebayConnector`, the offloading spec `ForebaySpec` and the tier `forebay`."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "ForebayConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("ForebayConnector", "forebay.vllm_ext.connector", "ForebayConnector")
    if "ForebaySpec" not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec("ForebaySpec", "forebay.vllm_ext.spec", "ForebaySpec")
    if "forebay" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("forebay", "forebay.vllm_ext.tier", "ForebayTier")
    logger.debug("forebay is registered with vLLM")
