"""``dask gpurt doctor``: check the environment and a cluster, with a remedy for each problem.

`dask_gpurt.command.checks` checks the local environment, and the job or pod that it is in. This
module checks the cluster, without switching anything on.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.command.checks.local import Finding, Level, local_findings
from dask_gpurt.command.checks.pod import pod_facts, pod_findings
from dask_gpurt.command.checks.slurm import job_environ, job_facts, slurm_findings
from dask_gpurt.command.connect import ConnectError, address_of, ask, connected, silent
from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.layout import terminal_width, wrapped
from dask_gpurt.command.run_report import device_note, times
from dask_gpurt.plugins.bootstrap import difference, installed
from dask_gpurt.tracing.advice import of_fallback

_BAD_USAGE = 2

#: Packages whose versions must match between processes that exchange data.
_COMPARED = ("python", "dask", "distributed", "pandas", "numpy")


def examine(scheduler: str | None, scheduler_file: Path | None, as_json: bool) -> int:
    """Run all checks and print the findings.

    Returns
    -------
    int
        0 without problems, 1 with problems, 2 if the named scheduler does not answer.
    """
    # A finding reports an invalid setting. The warning would repeat it.
    with silent("dask_gpurt"):
        seen = job_facts()
        findings = local_findings() + slurm_findings(job_environ(os.environ), seen)
        findings += pod_findings(os.environ, pod_facts(seen))
    failure: ConnectError | None = None
    try:
        address = address_of(scheduler, scheduler_file)
        if address is not None:
            with connected(address) as client:
                findings += cluster_findings(ask(client, versions=True))
    except ConnectError as error:
        failure = error
        findings.append(Finding("problem", "cluster", error.problem, error.remedy))
    n_problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        found = {"problems": n_problems, "findings": [asdict(finding) for finding in findings]}
        print(to_json(found))
    else:
        print(as_text(findings, n_problems, terminal_width()))
    if failure is not None:
        print(f"dask gpurt doctor: {failure}", file=sys.stderr)
        return _BAD_USAGE
    return 1 if n_problems else 0


def cluster_findings(found: Mapping[str, Any]) -> list[Finding]:
    """Return the findings in a cluster's status.

    Parameters
    ----------
    found
        Result of `dask_gpurt.command.connect.ask`.
    """
    findings = [Finding("ok", "cluster", f"reachable at {found['scheduler']}")]
    if found["active"]:
        text = f"on, dask_gpurt {found['version']} on host {found['host']}"
        findings.append(Finding("ok", "runtime", text))
    else:
        never = "version" not in found
        remedy = (
            "set DASK_GPURT__ENABLED=true in the environment of the program that connects to it"
            if never
            else "remove the reason, then " * bool(found["unusable"])
            + "call dask_gpurt.enable(client)"
        )
        level: Level = "problem" if "not one this dask_gpurt" in str(found["reason"]) else "note"
        findings.append(Finding(level, "runtime", f"off: {found['reason']}", remedy))
    findings += _versions(found)
    for worker, report in sorted(found["workers"].items()):
        if problem := found["not_ready"].get(worker):
            findings.append(Finding("problem", "worker", problem, _fallback_remedy(problem)))
        elif report:
            findings.append(Finding("ok", "worker", f"{worker}: on, {report['version']}"))
            findings.append(_memory(worker, report))
            findings += _device(worker, report)
        elif worker in found.get("silent", ()):
            text = f"{worker} does not answer"
            findings.append(Finding("problem", "worker", text, _STUCK_REMEDY))
        elif found["active"]:
            text = f"{worker} has not reported that it is ready"
            findings.append(
                Finding("note", "worker", text, _fallback_remedy("no word from worker"))
            )
    findings += _topology(found)
    findings += _links(found)
    findings += _open_files(found)
    for one in found["fallbacks"]:
        text = f"{one['what']} ran on stock Dask {times(one['count'])}: {one['why']}"
        findings.append(Finding("note", "fallback", text, _fallback_remedy(one["why"])))
    if found["active"] and not found["fallbacks"]:
        findings.append(Finding("ok", "fallback", "no shuffle fell back to stock Dask"))
    return findings


_STUCK_REMEDY = (
    "something blocks its event loop: look for code that holds the GIL, or restart the worker"
)
#: Remedies for a worker that uses Dask's store, by a part of the reason.
_STORE_REMEDIES = {
    "gpurt.memory.enabled": "set gpurt.memory.enabled to true, if that was not on purpose",
    "no memory limit": "start workers with --memory-limit, and keep Dask's spilling on",
    "dask-cuda": "set gpurt.memory.replace-dask-cuda to true, to replace that store",
    "store of its own kind": "start workers without `data=`, so that the runtime manages data",
}


def _memory(worker: str, report: Mapping[str, Any]) -> Finding:
    """Return whether a worker's task outputs are managed, with their directory, or why not."""
    if report["memory"] is None:
        why = str(report["unmanaged"])
        remedies = (remedy for part, remedy in _STORE_REMEDIES.items() if part in why)
        text = f"{worker}: Dask's own store, because {why}"
        return Finding("note", "memory", text, next(remedies, ""))
    disk = report["memory"]["disk"]
    text = f"{worker}: managed; values that do not fit spill to {disk['directory']}"
    if disk["problem"] is not None:
        remedy = "set gpurt.memory.directory, or Dask's temporary-directory, to a disk with room"
        problem = f"{text}, which cannot be written to: {disk['problem']}"
        return Finding("problem", "memory", problem, remedy)
    if not disk["is_direct"]:
        remedy = (
            "set gpurt.memory.directory to a local disk; tmpfs and some network file systems lack"
            " direct I/O"
        )
        through = f"{text}, through the page cache, which uses memory"
        return Finding("note", "memory", through, remedy)
    return Finding("ok", "memory", f"{text}, past the page cache once that is full")


def _device(worker: str, report: Mapping[str, Any]) -> list[Finding]:
    """Return whether GPU values are managed, and which libraries' allocations may evict them."""
    device = (report["memory"] or {}).get("device")
    if device is None:
        return []
    note = device_note(device)
    if note is not None:
        remedy = "call cudf.set_option('spill', False) on workers, so that the store manages them"
        return [Finding("note", "gpu", f"{worker}: {note}", remedy if "cuDF" in note else "")]
    if device["name"] is None:
        return [Finding("ok", "gpu", f"{worker}: not used yet")]
    evicts_for = _listed(device["evicts_for"])
    text = f"{worker}: {device['name']}, managed; values are evicted for {evicts_for}"
    return [Finding("ok", "gpu", text)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) if names else "no failed allocation"


#: Most workers that a finding names.
_MAX_NAMED = 3


def _topology(found: Mapping[str, Any]) -> list[Finding]:
    """Return whether the machines are described, and whether the probe of links succeeded."""
    topology = found.get("topology")
    if topology is None:
        return []
    undescribed, file = topology["undescribed"], topology["file"]
    n_workers = len(found["workers"])
    named = ", ".join(undescribed[:_MAX_NAMED]) + ", ..." * (len(undescribed) > _MAX_NAMED)
    if file == config.DISCOVERED:
        findings = [_reported(topology, n_workers, named)]
    elif file is not None:
        findings = [_written(topology, n_workers, named)]
    elif topology["hosts"] > 1:
        by_cost = (found.get("placement") or {}).get("policy") == "data-aware"
        so = "bandwidths are learnt" if by_cost else "stock Dask places tasks"
        text = f"{topology['hosts']} hosts that are not described: {so}"
        remedy = (
            "write a description with `dask gpurt topology`, and name it in gpurt.topology.file"
        )
        findings = [Finding("note", "topology", text, remedy)]
    else:
        findings = [Finding("ok", "topology", "one host")]
    return findings + _probe(topology["probe"])


_MEASURE = "measure with `dask gpurt topology --probe` while no task runs"


def _written(topology: Mapping[str, Any], n_workers: int, missing: str) -> Finding:
    """Return whether a file and workers' reports together describe all machines."""
    file = topology["file"]
    if n_missing := len(topology["undescribed"]):
        text = f"{n_missing} of {n_workers} workers are on no host of {file}, and have not reported"
        remedy = "correct `addresses` of its hosts, or `workers` of its devices"
        return Finding("problem", "topology", f"{text}: {missing}", remedy)
    if topology["is_speed_missing"]:
        text = f"{file} lacks the speed of a link, which no worker could report"
        return Finding("note", "topology", text, f"add it, or {_MEASURE}")
    text = f"machines are described in {file}"
    if n_reported := topology["reported_hosts"]:
        text += f"; workers report those that it lacks: {n_reported}"
    return Finding("ok", "topology", text)


def _reported(topology: Mapping[str, Any], n_workers: int, missing: str) -> Finding:
    """Return whether the machines that workers report are enough for placement."""
    if n_missing := len(topology["undescribed"]):
        text = f"{n_missing} of {n_workers} workers have not reported their machines: {missing}"
    elif topology["is_speed_missing"]:
        text = "a network card reports no speed, and it was not measured"
    else:
        return Finding("ok", "topology", "machines are described by workers' reports")
    remedy = f"{_MEASURE}, or name a description in gpurt.topology.file"
    return Finding("note", "topology", f"{text}: stock Dask places tasks", remedy)


def _probe(probe: Mapping[str, Any]) -> list[Finding]:
    """Return why the probe of links ended early, and the pairs that it could not measure."""
    findings = []
    if probe["state"] in ("failed", "stopped"):
        text = f"the probe of links {probe['state']}: {probe['reason']}"
        remedy = "measure again, while no task runs, with `dask gpurt topology --probe`"
        findings.append(Finding("note", "topology", text, remedy))
    for about, problem in probe["problems"].items():
        findings.append(Finding("note", "topology", f"{about}: {problem}"))
    return findings


#: Description of each transport between two workers.
_PATHS = {
    "shared": "in shared memory",
    "ucx": "over UCX",
    "comm": "through Dask's own connections",
}
#: The same, and what UCX may do beyond.
_BETTER = {**_PATHS, "device": "from device to device"}

#: Remedies for a transport that is not used, by a part of the reason.
_LINK_REMEDIES = {
    "without ucxx": (
        "install the ucx extra (pip install '.[ucx]') on every worker, if the network is fast"
    ),
    "another container": "on one host, start several workers in one container, with --nworkers",
    "no files in memory here": (
        "on Linux, allow memfd_create in the seccomp profile, as RuntimeDefault does"
    ),
    "its memory is not visible here": "on one host, run workers as one user, in one container",
}


def _link_remedy(why: str) -> str:
    remedies = (remedy for part, remedy in _LINK_REMEDIES.items() if part in why)
    return next(remedies, "")


def _fallback_remedy(why: str) -> str:
    sentence = of_fallback(why)
    return sentence[0].lower() + sentence[1:-1]


def _links(found: Mapping[str, Any]) -> list[Finding]:
    """Return the transports between workers, and why faster ones were not used."""
    groups = [one for report in found["workers"].values() if report for one in report["paths"]]
    if not groups:
        return _available_transports(found)
    findings = []
    for name, text in _PATHS.items():
        taken = [one for one in groups if one["path"] == name]
        if not taken:
            continue
        n_pairs = sum(one["peers"] for one in taken)
        pairs = "1 pair" if n_pairs == 1 else f"{n_pairs} pairs"
        findings.append(Finding("ok", "links", f"{pairs} of workers exchange {text}"))
        reasons: Counter[tuple[str, str]] = Counter()
        for one in taken:
            for reason in one["why_not"].items():
                reasons[reason] += one["peers"]
        for (better, why), count in reasons.most_common():
            text = f"{count} of them not {_BETTER[better]}: {why}"
            findings.append(Finding("note", "links", text, _link_remedy(why)))
    return findings


def _available_transports(found: Mapping[str, Any]) -> list[Finding]:
    """Return what workers lack for each transport, before any pair has connected."""
    reports = [report for report in found["workers"].values() if report]
    findings = []
    for name in ("shared", "ucx"):
        lacking = Counter(why for report in reports if (why := report["lacks"].get(name)))
        if not lacking and reports:
            text = f"all workers can exchange {_PATHS[name]}"
            findings.append(Finding("ok", "links", f"{text}; pairs connect on first use"))
        for why, count in lacking.most_common():
            text = f"{count} of {len(reports)} workers cannot exchange {_PATHS[name]}: {why}"
            findings.append(Finding("note", "links", text, _link_remedy(why)))
    return findings


def _open_files(found: Mapping[str, Any]) -> list[Finding]:
    """Return where workers may have too few open files for connections to all others."""
    from dask_gpurt.plugins.shuffle.peer_connections import needed_files

    needed = needed_files(len(found["workers"]))
    limits = [report["open_files"] for report in found["workers"].values() if report]
    few = [limit for limit in limits if limit < needed]
    if not few:
        return []
    text = (
        f"{len(few)} of {len(limits)} workers may have only {min(few):,} files open: shuffles "
        "work, but close connections to make others"
    )
    remedy = f"start workers with a hard limit of {needed:,} or more (ulimit -Hn {needed})"
    return [Finding("note", "open files", text, remedy)]


def _versions(found: Mapping[str, Any]) -> list[Finding]:
    """Return where installed versions differ from those here."""
    findings = []
    ours = found.get("version")
    if ours is not None and ours != dask_gpurt.__version__:
        text = f"the scheduler has dask_gpurt {ours}, this is {dask_gpurt.__version__}"
        remedy = f"pip install dask-gpurt=={dask_gpurt.__version__} there"
        findings.append(Finding("problem", "versions", text, remedy))
    versions = found["versions"]
    here = _packages(versions["client"])
    if versions["workers"] is None:
        text = "not all workers reported their versions in time"
        findings.append(Finding("problem", "versions", text, _STUCK_REMEDY))
    others = {"the scheduler": versions["scheduler"], **(versions["workers"] or {})}
    for who, theirs in others.items():
        packages = _packages(theirs or {})
        # Workers that are not ready, and schedulers of another version, are named elsewhere.
        differs = None if found["active"] else difference(packages, installed())
        if theirs and differs is not None:
            problem, _, remedy = differs.partition("; ")
            findings.append(Finding("problem", "versions", f"{who}: {problem}", remedy))
            continue
        for name in _COMPARED:
            if packages.get(name) != here.get(name):
                text = f"{who} has {name} {packages.get(name)}, here it is {here.get(name)}"
                remedy = "use one environment for clients, scheduler and workers"
                findings.append(Finding("note", "versions", text, remedy))
    if not findings:
        findings.append(Finding("ok", "versions", "the same on scheduler and workers as here"))
    return findings


def _packages(one: Mapping[str, Any]) -> dict[str, str]:
    host = {name: str(value).split(".final")[0] for name, value in one.get("host", {}).items()}
    return {"python": host.get("python", ""), **one.get("packages", {})}


def as_text(findings: list[Finding], n_problems: int, columns: int | None = None) -> str:
    """Return the findings as text, wrapped at `columns` if given."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        first = f"{finding.level:<7}  {finding.what:<{width}}  "
        # In a narrow terminal, indent continuation lines only a little.
        blank = " " * (len(first) if columns is None or columns >= 3 * len(first) else 4)
        lines += wrapped(finding.text, columns, first, blank)
        if finding.remedy:
            lines += wrapped(finding.remedy, columns, f"{blank}-> ", f"{blank}   ")
    end = {0: "no problems", 1: "1 problem"}.get(n_problems, f"{n_problems} problems")
    return "\n".join([*lines, "", end])
