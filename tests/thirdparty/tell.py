"""A preload of clients that writes a file, which says whether the runtime is on.

It also gives workers more than Dask's five seconds to exit, which a busy machine needs. See
`nannies_are_patient` in `tests/conftest.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from distributed import Client, Nanny

from dask_gpurt.plugins import activation

# Only the default is changed, and not wrapped, because Dask loads a preload file twice.
Nanny.close.__defaults__ = (60, "nanny-close")


async def dask_setup(client: Client) -> None:
    status = await activation.read_status(client, ask_workers=False)
    Path(f"client-{os.getpid()}-{client.id}.told").write_text(f"{status['active']}\n")
