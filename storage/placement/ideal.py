"""The fastest that a set of devices can deliver a number of bytes: the measure of every placement."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def ideal_time(
    size: float,
    bandwidths: Sequence[float],
    latencies: Sequence[float] | None = None,
    capacities: Sequence[float] | None = None,
) -> float:
    """Seconds to read `size` bytes from all devices at once, split in the best way.

    Minimises T = max_d (l_d + n_d / B_d) over sum n_d = N, 0 <= n_d <= C_d. By time T device d can have
    delivered min(C_d, B_d (T - l_d)) bytes, none before l_d; T* is where these add up to N. Without capacities
    this is T* = (N + sum B_d l_d) / sum B_d over the devices with l_d < T*.

    Args:
        size: N, bytes.
        bandwidths: B_d, bytes/s; 0 for a device that is not used.
        latencies: l_d, seconds; default 0.
        capacities: C_d, bytes that can lie on the device; default unbounded.

    Raises:
        ValueError: when the usable devices cannot hold `size` bytes.
    """
    lags, limits = _defaults(bandwidths, latencies, capacities)
    devices = [device for device, bandwidth in enumerate(bandwidths) if bandwidth > 0]
    room = sum(limits[device] for device in devices)
    if room < size:
        raise ValueError(f"{size:.0f} bytes do not fit into the {room:.0f} bytes of the usable devices")
    moments = {lags[device] for device in devices}
    moments |= {lags[device] + limits[device] / bandwidths[device] for device in devices}
    return _first_time(size, bandwidths, lags, limits, devices, sorted(moments - {inf}))


def ideal_shares(
    size: float,
    bandwidths: Sequence[float],
    latencies: Sequence[float] | None = None,
    capacities: Sequence[float] | None = None,
) -> list[float]:
    """Bytes on each device for which `ideal_time` is reached: n_d = min(C_d, B_d (T* - l_d))."""
    lags, limits = _defaults(bandwidths, latencies, capacities)
    time = ideal_time(size, bandwidths, lags, limits)
    return [
        min(limit, bandwidth * max(0.0, time - lag)) if bandwidth > 0 else 0.0
        for bandwidth, lag, limit in zip(bandwidths, lags, limits, strict=True)
    ]


def _defaults(
    bandwidths: Sequence[float], latencies: Sequence[float] | None, capacities: Sequence[float] | None
) -> tuple[Sequence[float], Sequence[float]]:
    return latencies or [0.0] * len(bandwidths), capacities or [inf] * len(bandwidths)


def _first_time(
    size: float,
    bandwidths: Sequence[float],
    lags: Sequence[float],
    limits: Sequence[float],
    devices: Sequence[int],
    moments: Sequence[float],
) -> float:
    """Walk from one change of slope to the next until `size` bytes are delivered."""
    if size <= 0:
        return 0.0
    delivered, now = 0.0, 0.0
    for moment in [*moments, inf]:
        rate = sum(
            bandwidths[device]
            for device in devices
            if lags[device] <= now < lags[device] + limits[device] / bandwidths[device]
        )
        if rate > 0 and delivered + rate * (moment - now) >= size:
            return now + (size - delivered) / rate
        if moment < inf:
            delivered, now = delivered + rate * (moment - now), moment
    return now
