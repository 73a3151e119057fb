"""Contractions in the graphs of a live scheduler: which tasks are products, and of which output.

A *product* needs two results, its *operands*, that other products need as well. It is a part of one
*output*: the result of summing products and of the tasks that the sum is passed on to.
`dask_gpurt.placement.contractions` decides which host makes an output. This module reads the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from dask_gpurt.placement.contractions import ContractionPlan, Operand, Side, grid
from dask_gpurt.placement.siblings import MAX_INPUTS
from dask_gpurt.plugins.placement.join_partners import MAX_CHAIN, MAX_PLACES
from dask_gpurt.plugins.placement.scheduler_view import PlacementView

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

#: Least products that need the operand with fewer products, and the other one. With fewer products
#: there is little to save.
MIN_USES, MIN_MOST_USES = 2, 3
#: Limit of tasks from a product to its output, and of tasks of an output with its products.
MAX_STEPS = 8
MAX_TASKS = 512
#: Limit of contractions whose plans are kept.
MAX_PLANS = 16
#: Limit of the users of one operand that are looked at.
MAX_USERS = 1_000
#: Limit of undescribed hosts whose links are compared: 2.5 ms when a worker joins or leaves.
MAX_COMPARED = 128


class Contractions:
    """The plans for the contractions of one scheduler."""

    def __init__(self, scheduler: Scheduler, view: PlacementView) -> None:
        self._scheduler = scheduler
        self._view = view
        #: Plans by the groups of output and operands; None if hosts would get too unequal parts.
        self._plans: OrderedDict[tuple[str, str, str], ContractionPlan | None] = OrderedDict()
        #: Groups of products without a plan, for a quick test.
        self._unplanned: set[str] = set()
        self._hosts: list[str] | None = None

    def workers_changed(self) -> None:
        """Drop all plans after a worker joined or left; later tasks get new ones."""
        self._hosts = None
        self._plans.clear()
        self._unplanned.clear()

    def host_of(self, product: TaskState) -> str | None:
        """Return the host planned for a product; None for other tasks, and without a plan."""
        planned = self._planned(product)
        return planned and planned[1]

    def host_of_root(self, root: TaskState) -> tuple[bool, str | None]:
        """Return whether a root task makes an operand, and the host planned for it, if any.

        If hosts are not alike, there are no plans, and the answer is always no.
        """
        if not self._alike_hosts():
            return False, None
        operand = root
        for _ in range(MAX_CHAIN):
            if not operand.dependents:
                return False, None
            # The plan assigns products in Dask's order.
            user = min(operand.dependents, key=_priority)
            if len(user.dependencies) > 1:
                if len(operand.dependents) < MIN_USES:
                    return False, None
                planned = self._planned(user)
                if planned is None:
                    return _is_product(user), None
                return True, planned[0].host_of_operand(operand.key)
            operand = user
        return False, None

    def _planned(self, product: TaskState) -> tuple[ContractionPlan, str] | None:
        if _group(product) in self._unplanned:
            return None
        if not (hosts := self._alike_hosts()) or not _is_product(product):
            return None
        output = _output_of(product, len(hosts))
        if output is None:
            return None
        one, other = sorted(product.dependencies, key=_group)
        groups = _group(output), _group(one), _group(other)
        if groups in self._plans:
            plan = self._plans[groups]
        else:
            rows, columns = self._sides(product, one, other)
            # The output found here may be a part of a larger one, of which there are more.
            is_enough = rows.length * columns.length >= len(hosts)
            shape = grid(len(hosts), rows, columns) if is_enough else None
            plan = self._plans[groups] = None if shape is None else ContractionPlan(hosts, shape)
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        if plan is None:
            if len(self._unplanned) >= MAX_PLANS:
                self._unplanned.clear()
            self._unplanned.add(_group(product))
            return None
        host = plan.host_of_product(one.key, other.key)
        if host is None:
            host = plan.assign(*self._operands(output, one, other))
        return plan, host

    def _alike_hosts(self) -> list[str]:
        """Return the hosts if all are alike; an empty list if not, or if there is only one.

        Hosts are alike if they have equally many threads, equal links and the same devices.
        """
        if self._hosts is None:
            infos, view = self._scheduler.host_info, self._view
            found = sorted(infos)
            alike = (
                len(found) > 1
                and len({infos[one]["nthreads"] for one in found}) == 1
                and len(view.with_gpu) in (0, len(self._scheduler.workers))
                and self._are_reached_alike([min(infos[one]["addresses"]) for one in found])
            )
            self._hosts = found if alike else []
        return self._hosts

    def _are_reached_alike(self, workers: list[str]) -> bool:
        """Return whether all hosts have equal links, given one worker of each."""
        links = self._view.links
        places = links.places
        if all(places[one].kind == places[workers[0]].kind for one in workers):
            return True
        if len(workers) > MAX_COMPARED:
            return False
        return not any(map(links.is_behind_slow_link, workers))

    def _sides(self, product: TaskState, one: TaskState, other: TaskState) -> tuple[Side, Side]:
        """Return rows and columns; each operand counts as one byte if sizes are not known.

        With `R` rows, `C` columns and `K` products per output there are `RKC` products of `RK`
        first operands and `KC` second ones. There may be more products of the same two operands.
        """
        sizes = self._view.sizes(one), self._view.sizes(other)
        if not all(sizes):
            sizes = 1, 1
        n_products, n_ones, n_others = (len(ts.group) for ts in (product, one, other))
        rows = Side(min(n_products / n_others, n_ones), sizes[0] * n_ones)
        return rows, Side(min(n_products / n_ones, n_others), sizes[1] * n_others)

    def _operands(
        self, output: TaskState, one: TaskState, other: TaskState
    ) -> tuple[list[Operand], list[Operand]]:
        """Return the first and the second operands of an output's products; some of very many."""
        kinds: dict[str, list[TaskState]] = {_group(one): [], _group(other): []}
        seen, fresh = {output}, [output]
        while fresh and len(seen) <= MAX_TASKS:
            # Sort by key, since the order of a set differs between processes.
            for needed in sorted(fresh.pop().dependencies, key=_key):
                if needed not in seen:
                    seen.add(needed)
                    kinds.get(_group(needed), fresh).append(needed)
        for operand in {one, other} - seen:
            kinds[_group(operand)].append(operand)
        rows, columns = ([self._operand(dts) for dts in found] for found in kinds.values())
        return rows, columns

    def _operand(self, ts: TaskState) -> Operand:
        who = ts.who_has or ()
        hosts = {ws.host for ws in who} if len(who) <= MAX_PLACES else ()
        return Operand(ts.key, self._view.sizes(ts) or 1, hosts)


def _is_product(ts: TaskState) -> bool:
    # The second test is for speed: without it, many tasks that need one block, each in a group of
    # its own, would look at one another.
    if len(ts.dependencies) != 2 or len(ts.group) < MIN_MOST_USES:
        return False
    one, other = ts.dependencies
    if len(one.dependents) < MIN_USES or len(other.dependents) < MIN_USES:
        return False
    # In `x @ x`, the two operands cannot be told apart.
    if one.group is other.group:
        return False
    fewer, more = sorted((_n_products(one, ts), _n_products(other, ts)))
    return fewer >= MIN_USES and more >= MIN_MOST_USES


def _n_products(operand: TaskState, product: TaskState) -> int:
    """Return the number of products that need an operand, or `MIN_MOST_USES` if there are more."""
    users = islice(operand.dependents, MAX_USERS)
    alike = (one for one in users if one.group is product.group)
    return sum(1 for _ in islice(alike, MIN_MOST_USES))


def _output_of(product: TaskState, min_outputs: int) -> TaskState | None:
    """Return the output of a product: the last task of its chain whose group is large enough."""
    found = product
    for _ in range(MAX_STEPS):
        if len(found.dependents) != 1:
            break
        (later,) = found.dependents
        if len(later.group) < min_outputs or len(later.dependencies) > MAX_INPUTS:
            break
        found = later
    return found if len(found.group) >= min_outputs else None


def _key(ts: TaskState) -> str:
    return str(ts.key)


def _group(ts: TaskState) -> str:
    return ts.group.name


def _priority(ts: TaskState) -> tuple[float, ...]:
    return ts.priority or ()
