"""Simulations with a placement policy of `gpurt.placement.policy`."""

from __future__ import annotations

import asyncio
from typing import Literal

from distributed import Scheduler

from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import ClusterModel, TopologyNetwork
from dask_gpurt.simulate.program import ProgramModel
from dask_gpurt.simulate.result import Result


def simulate_placed(
    policy: Literal["auto", "data-aware", "stock"], program: ProgramModel, cluster: ClusterModel
) -> Result:
    """Simulate a program with a placement policy, which knows the topology if there is one."""

    def install(scheduler: Scheduler) -> None:
        if policy != "stock":
            network = cluster.network
            topology = network.topology if isinstance(network, TopologyNetwork) else None
            Placement(scheduler, policy, topology, clock=asyncio.get_running_loop().time)

    return simulate(program, cluster, install)
