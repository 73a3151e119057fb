"""The plugin sent to workers needs no package there, and versions are compared correctly."""

from __future__ import annotations

import pickle
import pickletools
import socket
from importlib.metadata import requires

import distributed
import pytest
from distributed.utils_test import gen_cluster
from packaging.requirements import Requirement

from dask_gpurt import config
from dask_gpurt.plugins import bootstrap
from dask_gpurt.plugins.patches import p2p

HERE = bootstrap.installed()


def test_package_metadata_agree_with_the_version_gate():
    """Otherwise pip could install a Dask on which the package refuses to run."""
    oldest, first_unknown = p2p.TESTED
    needed = [Requirement(one) for one in requires("dask-gpurt")]
    for name in ("dask", "distributed"):
        (one,) = (r for r in needed if r.name == name and r.marker is None)
        bounds = {(bound.operator, bound.version) for bound in one.specifier}
        assert bounds == {(">=", oldest), ("<", first_unknown)}


@pytest.mark.parametrize("version", ["unknown", "", "1!9999", "2026.8.0 "])
def test_odd_version_strings_are_refused_or_read(version):
    reason = p2p.unsupported_reason(version) if version else bootstrap.untested("", p2p.TESTED)
    assert (reason is None) == (version.strip() == "2026.8.0")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, None),
        ({"python": "{minor}.99.final.0"}, None),
        ({"distributed": HERE["distributed"] + "+7.gabc"}, None),
        (
            {"python": "3.10.1.final.0"},
            "Python 3.10 runs there, not {minor}; use Python {minor} there",
        ),
        (
            {"dask-gpurt": None},
            "dask-gpurt is not installed there; run `pip install dask-gpurt=={dask-gpurt}` there",
        ),
        (
            {"dask-gpurt": "0.0.9"},
            "dask-gpurt 0.0.9 is installed there, not {dask-gpurt}; "
            "run `pip install dask-gpurt=={dask-gpurt}` there",
        ),
        (
            {"dask": "2031.1.0", "distributed": "2031.1.0"},
            "dask 2031.1.0 is installed there, not {dask}, "
            "distributed 2031.1.0 is installed there, not {distributed}; "
            "run `pip install dask=={dask} distributed=={distributed}` there",
        ),
        (
            {"python": "3.10.1", "distributed": "no version"},
            "Python 3.10 runs there, not {minor}, "
            "distributed no version is installed there, not {distributed}; "
            "use Python {minor} there and run `pip install distributed=={distributed}` there",
        ),
    ],
)
def test_differing_versions_are_described(found, said):
    names = {**HERE, "minor": HERE["python"].rpartition(".")[0]}
    found = {name: value and value.format(**names) for name, value in found.items()}
    expected = said and said.format(**names)
    assert bootstrap.difference({**HERE, **found}, HERE) == expected


def test_the_place_of_a_worker_names_its_slurm_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    on_host = f"on host {socket.gethostname()}"
    assert bootstrap._place() == on_host
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert bootstrap._place() == f"{on_host} in SLURM job 17"


def test_bootstrap_pickles_only_text_and_plain_values():
    """Only the text of a module, plain values, and the builtin that makes a plugin of them."""
    data = bootstrap.pickled(p2p.TESTED, config.read().to_plain())
    strings: list[str] = []
    made = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STACK_GLOBAL":
            made.append(".".join(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
        assert opcode.name != "GLOBAL"
    assert made == ["builtins.eval"]
    plugin = pickle.loads(data)
    assert isinstance(plugin, distributed.WorkerPlugin)
    assert type(plugin) is not bootstrap.GpurtWorker
    assert plugin.name == "gpurt"


@gen_cluster(nthreads=[("", 1)])
async def test_worker_with_untested_distributed_is_not_changed(s, a):
    before = dict(a.handlers), dict(vars(a.plugins["shuffle"])), a.data
    tested = ("2000.1.0", "2001.1.0")
    plugin = bootstrap.GpurtWorker(HERE, tested, config.read().to_plain())
    reason = await plugin._attach(a)
    assert reason.startswith(f"distributed {distributed.__version__} is not one this dask_gpurt")
    assert (dict(a.handlers), dict(vars(a.plugins["shuffle"])), a.data) == before
