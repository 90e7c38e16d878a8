"""The pool's configuration inside vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forebay.storage.config import PoolConfig, load_config
from forebay.storage.errors import ConfigError


def read_pool_config(extra: Mapping[str, Any], dp_rank: int = 0, dp_size: int = 1) -> PoolConfig:
    """The pool's configuration out of vLLM's extra configuration.

    `{dp_rank}` in paths is replaced by the data-parallel rank: every replica has its own pool.

    Raises:
        ConfigError: no `pool` given, replicas that would share one, or what `load_config` refuses.
    """
    source = extra.get("pool")
    if source is None:
        raise ConfigError('kv_connector_extra_config has no "pool"; add {"pool": "pool.yaml"}')
    if not isinstance(source, str | Mapping):
        raise ConfigError(f'"pool" is {source!r}; give the path of a pool.yaml or its keys')
    config = load_config(source)
    paths = [str(config.path), *(str(device.path) for device in config.devices if device.path)]
    if dp_size > 1 and not all("{dp_rank}" in path for path in paths):
        raise ConfigError(
            f"{dp_size} data-parallel replicas would share {paths[0]!r}; put {{dp_rank}} into every path of the pool"
        )
    data = json.loads(config.model_dump_json().replace("{dp_rank}", str(dp_rank)))
    return PoolConfig.model_validate(data)
