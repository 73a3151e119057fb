"""Jobs share a directory on a file system whose locks are local to each node.

No such file system is mounted here. Instead, no process of the jobs ever sees a lock of another:
`flock` does nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.slurm.job_cluster import SMALL_MEMORY, cluster_of_jobs
from tests.deploy.slurm.throwaway import Slurm
from tests.failure.memory_stage import expected_sums, make_block, sums_of
from tests.limits import HANG_S

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Python imports a module of this name when it starts.
_NO_LOCKS = """
import fcntl

fcntl.flock = lambda *arguments: None
"""
N_BLOCKS = 30


def exists(path: str) -> bool:
    return Path(path).exists()


@pytest.mark.parametrize("locking", ["True", "False"])
def test_jobs_with_local_locks_give_right_answers(
    slurm: Slurm, tmp_path: Path, locking: str
) -> None:
    """Only without Dask's locks, a worker that joins leaves the directories of others alone."""
    (tmp_path / "sitecustomize.py").write_text(_NO_LOCKS)
    prologue = [*SMALL_MEMORY, f"export PYTHONPATH=$PYTHONPATH:{tmp_path}"]
    prologue.append(f"export DASK_DISTRIBUTED__WORKER__USE_FILE_LOCKING={locking}")
    options = {"memory": "64MiB", "local_directory": str(tmp_path / "shared")}
    with cluster_of_jobs(slurm, 1, prologue, **options) as jobs:
        client = jobs.client
        blocks = client.map(make_block, range(N_BLOCKS))
        assert sums_of(client, blocks) == expected_sums(N_BLOCKS)
        ((first, directory),) = client.run(lambda dask_worker: dask_worker.local_directory).items()
        values = [str(path) for path in Path(directory).glob("dask-gpurt-values-*")]
        assert any(Path(one).is_dir() for one in values)
        jobs.cluster.scale(jobs=2)
        client.wait_for_workers(2, timeout=HANG_S)
        assert all(exists(one) for one in values) == (locking == "False")
        assert sums_of(client, blocks) == expected_sums(N_BLOCKS)
        assert first in client.scheduler_info(n_workers=-1)["workers"]
