"""The KV pool: devices, bandwidth profile, placement, index, journal and transfers. Knows no engine."""
