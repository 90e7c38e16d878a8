"""One line about what was loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from forebay.compression.budget import format_size
from forebay.vllm_ext.plugin import log_like_vllm

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadReport:
    """Counts the compressed layers of this process and says once, after the last, what they take."""

    created: int = 0
    loaded: int = 0
    bytes: int = 0
    dense_bytes: int = 0
    """Of the same layers uncompressed."""

    def add(self, bytes: int, dense_bytes: int, path: str) -> None:
        """Note a loaded layer; `path` is what computes it."""
        self.loaded += 1
        self.bytes += bytes
        self.dense_bytes += dense_bytes
        if self.loaded == self.created:
            log_like_vllm()
            logger.info(
                "forebay parser: %d layers, %s, %s routed experts instead of %s",
                self.loaded,
                path,
                format_size(self.bytes),
                format_size(self.dense_bytes),
            )
