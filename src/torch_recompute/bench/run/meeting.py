"""Where the ranks of a job find each other: torch's store, behind a prefix, so that several groups can share it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(days=2)


def meet(host: str, port: int, prefix: str, *, hosts: bool = False) -> Any:
    """The store at an address.

    Args:
        host: Of the machine.
        port: There.
        prefix: What all keys of this group begin with.
        hosts: Whether this process is to keep the store.
    """
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=hosts, wait_for_workers=False, timeout=PATIENCE
    )
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
