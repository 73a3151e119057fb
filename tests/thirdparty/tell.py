"""Preload of a client: writes into the working directory whether the runtime is on there.

It also gives workers more than Dask's five seconds to end, as on a busy machine they need them. See
`nannies_are_patient` in `tests/conftest.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from distributed import Client, Nanny

from dask_gpurt.plugins import activation

# The defaults alone: Dask loads a preload that is a file twice.
Nanny.close.__defaults__ = (60, "nanny-close")


async def dask_setup(client: Client) -> None:
    status = await activation._status(client, ask_workers=False)
    Path(f"client-{os.getpid()}-{client.id}.told").write_text(f"{status['active']}\n")
