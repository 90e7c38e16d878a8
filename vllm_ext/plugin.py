"""Entry point of the group `vllm.general_plugins`: makes forebay's names known to vLLM.

Runs in every vLLM process, possibly more than once; registers only what is missing and imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def register() -> None:
    """Register the connector `ForebayConnector`, the offloading spec `ForebaySpec`, the tier `forebay`, the
    quantization method `parser` and the architectures of diffusion language models.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "ForebayConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("ForebayConnector", "forebay.vllm_ext.connector", "ForebayConnector")
    if "ForebaySpec" not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec("ForebaySpec", "forebay.vllm_ext.spec", "ForebaySpec")
    if "forebay" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("forebay", "forebay.vllm_ext.tier", "ForebayTier")
    _register_parser()
    _register_diffusion()
    log_like_vllm()
    check_command_line(sys.argv)


def _register_parser() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if "parser" not in QUANTIZATION_METHODS:
        from forebay.vllm_ext.parser.config import ParserQuantConfig

        register_quantization_config("parser")(ParserQuantConfig)


def _register_diffusion() -> None:
    from forebay.vllm_ext.diffusion import architecture, hf

    hf.register()
    architecture.register()


def check_command_line(arguments: Sequence[str]) -> None:
    """End `vllm serve` with one line when its model or its pool cannot be used as it asks.

    Without this the mistake would surface half a minute later, as three processes' tracebacks.

    Raises:
        SystemExit: with the line.
    """
    if len(arguments) > 2 and arguments[1] == "serve":
        _check_model(Path(arguments[2]), arguments[3:])
    config = _json_option(arguments, "--kv-transfer-config")
    if config.get("kv_connector") == "ForebayConnector":
        _check_pool(config.get("kv_connector_extra_config") or {})


def _json_option(arguments: Sequence[str], wanted: str) -> dict[str, Any]:
    """The object that an option has; empty where it has none, or something else: vLLM says what is wrong with it."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, attached = option.partition("=")
        if name.replace("_", "-") == wanted:
            with contextlib.suppress(ValueError):
                found = json.loads(attached or value)
                return found if isinstance(found, dict) else {}
    return {}


def _check_model(folder: Path, options: Sequence[str]) -> None:
    try:
        config = json.loads((folder / "config.json").read_text())
        compressed = (config.get("quantization_config") or {}).get("quant_method") == "parser"
    except (OSError, ValueError, AttributeError):
        return  # no folder of ours: vLLM says what is wrong with it
    if compressed:
        _check_compressed(folder, config["quantization_config"], options)
    elif _is_diffusion(config):
        _check_diffusion(folder, options)


def _check_compressed(folder: Path, found: dict[str, object], options: Sequence[str]) -> None:
    from forebay.compression.checkpoint import parse_config
    from forebay.compression.errors import CompressionError
    from forebay.vllm_ext.parser.engine import EngineSettings
    from forebay.vllm_ext.parser.loading import check_folder

    try:
        parser = parse_config(found)
        EngineSettings.of_command_line(options).check(parser)
        check_folder(folder, parser)
    except CompressionError as error:
        raise SystemExit(f"forebay: {error}") from None


def _is_diffusion(config: dict[str, object]) -> bool:
    from forebay.diffusion.errors import DiffusionError
    from forebay.diffusion.families import find_family

    try:
        family = find_family(config)
    except DiffusionError:
        return False
    return family.name != "Llama" or (config.get("is_causal") is False and config.get("mask_token_id") is not None)


def _check_diffusion(folder: Path, options: Sequence[str]) -> None:
    from forebay.diffusion.depth import DepthTable
    from forebay.diffusion.errors import DiffusionError
    from forebay.diffusion.weights import Shard, read_config
    from forebay.vllm_ext.diffusion.config import read_config as read_serving
    from forebay.vllm_ext.diffusion.engine import EngineSettings

    try:
        _, config = read_config(folder)
        engine = EngineSettings.of_command_line(options)
        engine.check()
        Shard(size=engine.tensor_parallel_size).check(config)
        serving = read_serving(_json_option(options, "--additional-config"))
        if serving.table is not None:
            DepthTable.read(serving.table, config.layers)
    except DiffusionError as error:
        raise SystemExit(f"forebay: {error}") from None
    if serving.pool is not None:
        _check_pool(serving.model_dump(mode="json"))


def _check_pool(extra: dict[str, object]) -> None:
    from forebay.storage.errors import ForebayError
    from forebay.storage.lanes import check_paths
    from forebay.vllm_ext.pool_config import read_pool_config

    try:
        check_paths(read_pool_config(extra))
    except ForebayError as error:
        raise SystemExit(f"forebay: {error}") from None


def log_like_vllm() -> None:
    """Send forebay's log lines where vLLM's go, unless the user has configured them.

    Without effect until vLLM has set up its own logging, which may be later than it loads plugins.
    """
    ours, theirs = logging.getLogger("forebay"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
