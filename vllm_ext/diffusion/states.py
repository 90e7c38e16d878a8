"""States of prefixes in a pool, where they outlive the process and may be more than memory holds. Imports no vLLM."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.state_format import FORMAT, StateFormat
from forebay.diffusion.transformer import Transformer
from forebay.storage.config import DeviceConfig, PoolConfig
from forebay.storage.errors import ConfigError
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace, weights_fingerprint
from forebay.storage.pool import Pool
from forebay.storage.transfer import TransferEngine
from forebay.vllm_ext.diffusion.state_io import Load, StateIO, StoreStatistics, Write

logger = logging.getLogger(__name__)


class PoolStates:
    """A `forebay.diffusion.cache.StateStore` on a pool.

    ```python
    store = PoolStates.open(read_pool_config({"pool": "pool.yaml"}), folder, transformer)
    runtime = Runtime(transformer, table, settings, store)
    ```

    `put` returns at once; what waits to be written stays in memory, `max_pending_store` of the pool at most. `get`
    waits for the devices, for `faults.deadline` at most. Whatever goes wrong with a device is a miss and a line in the
    log.
    """

    @classmethod
    def open(
        cls,
        config: PoolConfig,
        folder: Path,
        transformer: Transformer,
        name: str | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> PoolStates:
        """Open the pool, or this rank's part of it.

        Args:
            config: the pool.
            folder: of the model.
            transformer: the model.
            name: of the model, for people; its folder's when None.
            rank: of this process among those that share the model (tensor parallelism).
            ranks: how many there are.

        Raises:
            ForebayError: something of the pool cannot be used.
        """
        config = rank_config(config, rank, ranks)
        form = StateFormat.of(transformer)
        space = namespace(folder, transformer.config, form.dtype, name or folder.name, rank, ranks)
        pool = Pool.open(config, space)
        try:
            return cls(pool, open_lane(config), form)
        except BaseException:
            pool.close()
            raise

    def __init__(self, pool: Pool, engine: TransferEngine, form: StateFormat) -> None:
        self._faults, self._limit = pool.config.faults, pool.config.max_pending_store
        self._io = StateIO(pool, engine, form)
        self._io.start()

    @property
    def statistics(self) -> StoreStatistics:
        """Counts since it was opened."""
        return self._io.statistics

    def get(self, key: bytes, tokens_P: Tensor) -> PrefixStates | None:
        """The states of a prefix, as deep as they are there without a gap."""
        waiting = self._io.waiting(key)
        if waiting is not None:
            return _copy(waiting, tokens_P) if torch.equal(waiting.tokens_P, tokens_P.cpu()) else None
        started = time.monotonic()
        load = Load(key, tokens_P.cpu())
        self._io.load(load)
        if not load.done.wait(self._faults.deadline):
            self._failed(f"no answer within {self._faults.deadline:g} s")
            return None
        if load.problem:
            self._failed(load.problem)
            return None
        if load.blank is None:
            return None
        states = load.blank.states(tokens_P.device)
        if states is None:
            self._failed("what is stored is of another prefix")
            return None
        self.statistics.restored += 1
        self.statistics.restored_bytes += states.bytes
        self.statistics.restore_seconds += time.monotonic() - started
        return states

    def put(self, key: bytes, states: PrefixStates) -> None:
        """Keep states, in the background; dropped where too much is waiting already."""
        if self._io.broken or not (states.known or states.limit):
            return
        event = torch.cuda.current_stream().record_event() if states.tokens_P.is_cuda else None
        if not self._io.write(Write(key, _copy(states, states.tokens_P.cpu()), event), self._limit):
            self._io.say("too much waits to be written; raise max_pending_store, or give the pool a faster device")

    def close(self) -> None:
        """Write what is waiting, for as long as the devices answer, and close the pool; idempotent."""
        if not self._io.is_alive():
            return
        patience = 2 * self._faults.deadline
        self._io.stop(patience)
        self._io.join(patience + 1)
        if self._io.is_alive():
            logger.warning("prefix states: a device of the pool hangs; the pool is left as it is")

    def _failed(self, problem: str) -> None:
        self.statistics.failed_loads += 1
        logger.warning("prefix states: a load failed and the states are computed instead (%s)", problem)

    @property
    def bytes(self) -> int:
        """Of the pool that are in use, whoever put them there."""
        return self._io.held


def _copy(states: PrefixStates, tokens_P: Tensor) -> PrefixStates:
    """The same tensors, in states that grow by themselves."""
    return PrefixStates(tokens_P, list(states.known), dict(states.states), states.limit)


def namespace(
    folder: Path, config: DiffusionConfig, dtype: torch.dtype, name: str, rank: int = 0, ranks: int = 1
) -> Namespace:
    """What must be equal for the states of one model to be those of another: weights, settings, type and share."""
    return Namespace(
        model=name,
        weights=weights_fingerprint(folder),
        dtype=str(dtype).removeprefix("torch."),
        layout=f"prefix states {FORMAT}",
        tp=ranks,
        extra={"rank": str(rank), "config": json.dumps(asdict(config), sort_keys=True)},
    )


def rank_config(config: PoolConfig, rank: int, ranks: int) -> PoolConfig:
    """One rank's part of a pool, which is a pool of its own: files beside those named, and a share of every size.

    Raises:
        ConfigError: a raw block device, which ranks cannot share.
    """
    if ranks == 1:
        return config
    suffix = f".rank{rank}of{ranks}"

    def share(device: DeviceConfig) -> DeviceConfig:
        size = device.size // ranks if device.size else None
        if device.path is None:
            return device.model_copy(update={"size": size})
        if size is None or device.path.is_block_device():
            raise ConfigError(
                f"device {device.name!r}: {ranks} ranks cannot share {device.path} for prefix states; give a file on it"
            )
        return device.model_copy(update={"size": size, "path": device.path.with_name(device.path.name + suffix)})

    data = config.model_copy(update={"path": config.path / suffix[1:], "devices": tuple(map(share, config.devices))})
    return PoolConfig.model_validate(data.model_dump())
