"""How many bytes requests and states of prefixes may take."""

from __future__ import annotations

import os
import resource
from typing import Any

import torch

ACTIVATIONS = 0.1
"""Share of an accelerator's memory that a forward pass needs beside weights, keys and values (our choice)."""


def available_bytes(vllm_config: Any, device: torch.device) -> int:
    """What vLLM's settings leave beside the weights, which are loaded already.

    Raises:
        ValueError: nothing is left.
    """
    cache = vllm_config.cache_config
    if cache.kv_cache_memory_bytes is not None:
        return int(cache.kv_cache_memory_bytes)
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        share = cache.gpu_memory_utilization / vllm_config.parallel_config.tensor_parallel_size
    else:
        free, total = torch.cuda.mem_get_info(device)
        taken, share = total - free, cache.gpu_memory_utilization - ACTIVATIONS
    left = int(total * share) - taken
    if left <= 0:
        raise ValueError(
            f"the model takes {taken / 2**30:.1f} GiB and --gpu-memory-utilization {cache.gpu_memory_utilization:g} "
            f"allows for {total * share / 2**30:.1f} GiB; raise it, or set --kv-cache-memory-bytes"
        )
    return left
