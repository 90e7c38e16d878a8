"""What to do about the errors that an SPDK target gives.

Most RPCs answer with a generic code and the text of an errno, so the method and the text together say what is wrong.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

WRONG_SOCKET = "is --socket the RPC socket of an SPDK target?"
HUNG = "the target may still do it: look at its process and log, and with `forebay spdk status`, before trying again"
METHOD_NOT_FOUND = -32601
INVALID_STATE = -1

_BY_METHOD = {
    ("vhost_create_blk_controller", errno.ENODEV): "no such bdev: `forebay spdk status` lists those there are",
    ("vhost_create_blk_controller", errno.EEXIST): "the name is taken: give another --name",
    ("vhost_create_blk_controller", errno.EPERM): "something else has claimed the bdev: choose another bdev",
    ("vhost_create_blk_controller", errno.EIO): (
        "a file may lie where the socket should be: see the target's log, remove the file or give another --name"
    ),
    ("vhost_delete_controller", errno.EBUSY): "an initiator is connected: stop the engine that uses it",
    ("bdev_nvme_attach_controller", errno.ENODEV): (
        "no drive at this address that SPDK may use: unmount it and bind it with SPDK's "
        "`PCI_ALLOWED=ADDRESS scripts/setup.sh`; `scripts/setup.sh status` lists the drives"
    ),
    ("bdev_nvme_attach_controller", errno.EALREADY): "the name is taken: give another --name",
    ("bdev_get_bdevs", errno.ENODEV): "no such bdev: `forebay spdk status` lists those there are",
}


def for_refusal(method: str, code: int, message: str) -> str:
    """The fix for the target's refusal of `method`, or where to look."""
    if code == METHOD_NOT_FOUND:
        return "the target lacks this: use an SPDK application with vhost, such as spdk_tgt"
    if code == INVALID_STATE and "state" in message.lower():
        return "the target waits for its start: `spdk-rpc framework_start_init`"
    for (known, number), fix in _BY_METHOD.items():
        if known == method and (code == -number or os.strerror(number) in message):
            return fix
    return "see the target's log"


def for_errno(number: int, address: Path) -> str:
    """The fix for an error of the socket at `address`."""
    if number == errno.ENOENT:
        return "start spdk_tgt, or give --socket"
    if number == errno.ECONNREFUSED:
        return "nobody listens there any more: start spdk_tgt, or give --socket"
    if number in (errno.EACCES, errno.EPERM):
        return f"run this as the user who runs the target (sudo), or allow your user to write to {address}"
    return "did the target end? see its log"
