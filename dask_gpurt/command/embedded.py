"""A local cluster in a separate process, for a script that starts none.

Worker processes import the main module of the process that starts them. A script without a client
has no `if __name__ == "__main__":` guard, so the workers would run it again. Therefore the
scheduler and the nannies are not in the script's process. As a side effect, Ctrl-C does not reach
the workers, and the scheduler has its own interpreter lock.

`EmbeddedCluster` is the side in the script's process, `serve` the side in the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt import local_cluster
from dask_gpurt.command.traces import nsys_wrapper
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed.security import Security

#: How long running tasks may delay the end of the workers.
GRACE_S = 2.0
#: How much longer the process that kills the workers may take.
CLOSE_TIMEOUT_S = 5.0

#: The part of the cluster's security settings that a client needs.
_OF_CLIENTS = ("tls_ca_file", "tls_client_cert", "tls_client_key")

# With `-c`, the process has no main module for workers to import. The script's search path comes
# first, so that this package is found as in the script's process.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from dask_gpurt.command.embedded import serve; serve(int(sys.argv.pop(1)))"
)


class EmbeddedClusterError(GpurtError, RuntimeError):
    """The cluster for a script did not start."""


class EmbeddedCluster:
    """A running cluster of worker processes on this machine, which ends with this process.

    Parameters
    ----------
    n_workers, threads_per_worker
        None uses the default of `LocalCluster`: as much of the machine as this process may use.
    nsys
        Path of nsys, and the folder for its reports, to start the workers under it.
    memory_limit_nbytes
        Memory of each worker. None uses the default of `LocalCluster`.

    Attributes
    ----------
    address
        Address of the scheduler.
    dashboard
        Address of the dashboard, with its key; None if there is none.

    Raises
    ------
    EmbeddedClusterError
        The cluster did not start.
    """

    def __init__(
        self,
        n_workers: int | None,
        threads_per_worker: int | None,
        nsys: tuple[str, Path] | None = None,
        memory_limit_nbytes: int | None = None,
    ) -> None:
        import cloudpickle

        self.grace_s = GRACE_S

        settings = {key: value for key, value in dask.config.config.items() if key != "scheduler"}
        try:
            os.getcwd()
        except FileNotFoundError as error:
            # Worker processes would wait for ever.
            raise EmbeddedClusterError(
                "no cluster could be started: the working directory does not exist any more;"
                " change to another one"
            ) from error
        self._at_close = contextlib.ExitStack()
        wrapped = None
        if nsys is not None:
            # The other process may be killed, so this one makes the folder and removes it.
            folder = tempfile.TemporaryDirectory(prefix="gpurt-nsys-")
            wrapped = (*nsys, Path(self._at_close.enter_context(folder)))
        size = n_workers, threads_per_worker, memory_limit_nbytes
        order = cloudpickle.dumps((settings, size, wrapped))
        answer_fd, their_fd = map(_above_the_standard_ones, os.pipe())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(their_fd)],
                # The other process reads its arguments from this pipe, then waits for its end. That
                # comes when this process closes it or dies. Standard output stays the script's,
                # because it gets what tasks print.
                stdin=subprocess.PIPE,
                pass_fds=(their_fd,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(answer_fd)
            raise EmbeddedClusterError(f"no cluster could be started: {error}") from error
        finally:
            os.close(their_fd)
        with os.fdopen(answer_fd) as answer:
            try:
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(order)
                    self._process.stdin.flush()
                told: dict[str, Any] = json.loads(answer.read() or "{}")
            except BaseException:
                # Ctrl-C during the start.
                self._kill()
                raise
        if "address" not in told:
            self.close()
            why = told.get("error", f"its process ended with {self._process.returncode}")
            raise EmbeddedClusterError(f"no cluster could be started: {why}")
        self.address = told["address"]
        self.dashboard: str | None = told["dashboard"]
        self._certificate: dict[str, str] = told["security"]

    @property
    def security(self) -> Security:
        """The security settings for a client. Only this process has them."""
        from distributed.security import Security

        return Security(require_encryption=True, **self._certificate)

    def close(self) -> None:
        """End the processes. Idempotent."""
        assert self._process.stdin is not None
        with self._at_close:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(self.grace_s + CLOSE_TIMEOUT_S if self.grace_s else 0)
            except BaseException as error:
                self._kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise

    def _kill(self) -> None:
        # The process group has all workers, and nothing else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _above_the_standard_ones(fd: int) -> int:
    """Move a descriptor of a program that has no standard input, output or error.

    Every worker would inherit it, and the pipe would never end.
    """
    if fd > 2:
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def serve(answer_fd: int) -> None:
    """Start the cluster, report its address, and run until told to stop.

    This is the main function of the other process.
    """
    os.set_inheritable(answer_fd, False)
    settings, size, nsys = pickle.load(sys.stdin.buffer)
    dask.config.update(dask.config.config, settings, priority="new")
    if nsys is not None:
        nsys_wrapper.wrap_workers(*nsys)

    is_over = threading.Event()
    threading.Thread(target=_end_with_the_script, args=(is_over,), daemon=True).start()
    told: dict[str, Any]
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(local_cluster.start(*size))
            # Send secrets only through the pipe: other users can read arguments and environments.
            told = {
                "address": cluster.scheduler_address,
                "dashboard": local_cluster.offer_dashboard(cluster),
                "security": {name: getattr(cluster.security, name) for name in _OF_CLIENTS},
            }
        except local_cluster.InsecureClusterError as error:
            told = {"error": str(error)}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(answer_fd, "w") as answer:
            json.dump(told, answer)
        if "address" in told:
            is_over.wait()


def _end_with_the_script(is_over: threading.Event) -> None:
    """Wait until the script's process closes the pipe or dies; then let `serve` end, in time."""
    sys.stdin.buffer.read()
    is_over.set()
    # Neither a task nor a start that never ends may keep processes alive.
    time.sleep(GRACE_S)
    # The process group is our own.
    os.killpg(os.getpgrp(), signal.SIGKILL)
