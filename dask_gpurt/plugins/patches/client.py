"""Workers and schedulers in a client's process.

| what | why | taken back by |
|---|---|---|
| `Worker._instances`, `Scheduler._instances` | a client in a worker's process belongs to a task,
unless the whole cluster runs in that process | |
"""

from __future__ import annotations

from distributed import Scheduler, Worker


def workers_here() -> list[Worker]:
    """Return the started workers of this process, unordered."""
    return [one for one in tuple(Worker._instances) if one.scheduler is not None]


def scheduler_ids_here() -> set[str]:
    """Return the `id` in the identity of each scheduler of this process."""
    return {str(one.id) for one in tuple(Scheduler._instances)}


def address_of_scheduler(worker: Worker) -> str:
    """Return the address by which a worker found its scheduler; others may spell it differently."""
    return str(worker.scheduler.address)


def address_at_scheduler(worker: Worker) -> str:
    """Return the address by which its scheduler knows a worker."""
    return str(worker.contact_address)
