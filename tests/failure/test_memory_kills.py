"""Results are right if workers are killed while they write, read or remove values.

No file of a killed worker stays once the next worker has started.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, wait

import dask_gpurt
from tests.failure.gates import DEADLINE_S, Gate, until
from tests.failure.memory_stage import (
    N_BLOCKS,
    expected_sums,
    hold_a_call,
    hold_after_the_write,
    make_block,
    make_blocks,
    open_small,
    orphans,
    sum_of,
    sums_of,
)
from tests.thoroughness import some

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def _tell(client: Client, address: str, function: Callable[..., Any], *args: Any) -> Any:
    def call(dask_worker: Any) -> Any:
        return function(dask_worker, *args)

    return client.run(call, workers=[address])[address]


def _limit_files(dask_worker: Any, nbytes: int) -> None:
    import resource

    resource.setrlimit(
        resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def _half_each(client: Client, *addresses: str) -> list[Any]:
    """Make as many blocks on each worker; after its death, they may be anywhere."""
    n = len(addresses)
    shares = [
        client.map(make_block, range(i, N_BLOCKS, n), workers=[one], allow_other_workers=True)
        for i, one in enumerate(addresses)
    ]
    return [block for turn in zip(*shares, strict=True) for block in turn]


def _n_ready(client: Client) -> int:
    return sum(map(bool, dask_gpurt.status(client)["workers"].values()))


@pytest.mark.share(2)
@pytest.mark.parametrize("when", ["writing", "written", "reading", "removing"])
@pytest.mark.parametrize("where", some(["of all", "of the worker"], 1))
def test_killed_worker_loses_no_result(tmp_path: Path, when: str, where: str) -> None:
    # With stealing, the faster worker would get most blocks, and the victim might spill none.
    config: dict[str, Any] = {"distributed.scheduler.work-stealing": False}
    if where == "of all":
        # The next worker that starts removes leftovers there.
        config["gpurt.memory.directory"] = str(tmp_path / "values")
    with open_small(tmp_path, processes=True, **config) as client, Gate() as gate:
        victim, other = sorted(client.scheduler_info()["workers"])
        pid = _tell(client, victim, lambda dask_worker: os.getpid())
        if when == "written":
            _tell(client, victim, hold_after_the_write, gate.path)
        elif when == "writing":
            _tell(client, victim, hold_a_call, "pwrite", gate.path)
        blocks = _half_each(client, victim, other)
        if when in ("reading", "removing"):
            wait(blocks, timeout=DEADLINE_S)
            name = {"reading": "preadv", "removing": "unlink"}[when]
            _tell(client, victim, hold_a_call, name, gate.path)
        if when == "removing":
            del blocks
            gate.wait_for()
            blocks = _half_each(client, victim, other)
        sums = client.map(sum_of, blocks, pure=False)
        gate.wait_for()
        os.kill(pid, signal.SIGKILL)
        gate.open()
        assert client.gather(sums) == expected_sums()
        # The new worker sweeps before it is ready. The check takes the same locks as a sweep.
        until(lambda: _n_ready(client) == 2, "the killed worker was not restarted")
        assert not orphans(tmp_path), "what the dead worker left was not removed"
        assert sums_of(client, blocks) == expected_sums()
    assert not list(tmp_path.rglob("dask-gpurt-values-*"))


def test_file_size_limit_keeps_values_in_memory(tmp_path: Path) -> None:
    """Writes fail as on a full disk, because the system limits files of the process to 1 MiB."""
    with open_small(tmp_path, processes=True) as client:
        for address in client.scheduler_info()["workers"]:
            _tell(client, address, _limit_files, 1 << 20)
        blocks = make_blocks(client)
        assert sums_of(client, blocks) == expected_sums()
        cold = client.run(lambda dask_worker: len(dask_worker.data.disk))
        assert not any(cold.values())


def test_really_full_disk_keeps_values_in_memory(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = os.system(f"mount -t tmpfs -o size=5m tmpfs {small} 2>/dev/null")
    if mounted:
        pytest.skip("needs the right to mount a small disk")
    try:
        config = {"gpurt.memory.directory": str(small)}
        with open_small(tmp_path, processes=True, **config) as client:
            blocks = make_blocks(client)
            assert sums_of(client, blocks) == expected_sums()
            cold = client.run(lambda dask_worker: len(dask_worker.data.disk))
            assert 1 <= sum(cold.values()) <= 2
        assert not list(small.iterdir())
    finally:
        os.system(f"umount {small}")
