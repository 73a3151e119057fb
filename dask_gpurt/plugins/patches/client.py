"""What a client's process has of distributed, besides the client: its workers and schedulers.

| what | why |
|---|---|
| `Worker._instances`, `Scheduler._instances` | a client of a process that is a worker belongs to a
task, unless the whole cluster is in that process |
"""

from __future__ import annotations

from distributed import Scheduler, Worker


def workers_here() -> list[Worker]:
    """Workers of this process that have been started, in no order."""
    return [one for one in tuple(Worker._instances) if one.scheduler is not None]


def scheduler_ids_here() -> set[str]:
    """`id` in the identity of each scheduler of this process."""
    return {str(one.id) for one in tuple(Scheduler._instances)}


def address_of_scheduler(worker: Worker) -> str:
    """Address by which a worker found its scheduler, which others may spell differently."""
    return str(worker.scheduler.address)


def address_at_scheduler(worker: Worker) -> str:
    """Address by which its scheduler knows a worker."""
    return str(worker.contact_address)
