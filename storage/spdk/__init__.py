"""Controlling an SPDK target: drives become vhost-user-blk controllers that devices of kind `spdk` attach to.

Only the control plane: requests of JSON-RPC over the target's Unix socket, a few at a time. No byte of KV passes here.
"""
