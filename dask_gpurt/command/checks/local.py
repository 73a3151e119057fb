"""Checks of the local environment for `dask gpurt doctor`, without a cluster.

Each function checks one thing and returns its findings. Packages are looked up, not imported.
Configuration files are read, not changed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import dask.config
import yaml

from dask_gpurt import config, setting_values
from dask_gpurt.errors import ConfigError
from dask_gpurt.topology import description

Level = Literal["ok", "note", "problem"]

_NEEDED = ("dask", "distributed", "pandas", "pyarrow", "numpy", "dask-gpurt")
#: Packages of the GPU path. Wheels are named after their CUDA version.
_OPTIONAL = ("cudf", "cupy", "rmm", "ucxx", "nvcomp")
#: Fewer open files are worth a note.
_FEW_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    what
        Name of the checked thing, in a word or two.
    text
        Result of the check.
    remedy
        What the user can do; empty if nothing.
    """

    level: Level
    what: str
    text: str
    remedy: str = ""


def local_findings() -> list[Finding]:
    """Run all local checks."""
    return [
        *packages(),
        support(),
        flag(),
        settings(),
        *preloads(),
        *unknown_keys(),
        *system(),
        *array_expressions(),
        *working_directory(),
        gpu(),
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[Finding]:
    """Check the versions of required and optional packages."""
    found = [Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")]
    for name in _NEEDED:
        version = _version(name)
        if version is not None:
            found.append(Finding("ok", name, version))
        elif name == "dask-gpurt":
            text = "runs from a directory, without being installed"
            remedy = (
                "run `pip install .` in the checkout, so that Dask finds its defaults and commands"
            )
            found.append(Finding("note", name, text, remedy))
        else:
            found.append(Finding("problem", name, "not installed", f"pip install {name}"))
    for name in _OPTIONAL:
        wheels = {
            "nvcomp": ("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"),
            "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy"),
        }.get(name, (f"{name}-cu13", f"{name}-cu12", name))
        versions = [version for wheel in wheels if (version := _version(wheel))]
        found.append(Finding("ok", name, versions[0] if versions else "not installed (optional)"))
    return found


def support() -> Finding:
    """Check whether the installed version of distributed is supported."""
    from dask_gpurt.plugins.patches import p2p

    reason = p2p.unsupported_reason()
    if reason is None:
        return Finding("ok", "support", "this version of distributed is supported")
    oldest, first_unknown = p2p.TESTED
    versions = f">={oldest},<{first_unknown}"
    remedy = f"pip install 'dask{versions}' 'distributed{versions}'"
    return Finding("problem", "support", f"{reason}; stock Dask runs", remedy)


def working_directory() -> list[Finding]:
    """Check that the working directory exists. Without it, Dask starts no worker processes."""
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "it does not exist any more; worker processes would never start"
        return [Finding("problem", "working directory", text, "change to another directory")]
    return []


def flag() -> Finding:
    """Check whether the flag is set, and where."""
    value = dask.config.get("gpurt.enabled", None)
    where = _place_of("gpurt.enabled")
    if where is None:
        # Dask reads such names as settings of other packages.
        wrong = [one for one in os.environ if re.match("DASK_GPURT_[^_]", one)]
        if wrong:
            right = wrong[0].replace("DASK_GPURT_", "DASK_GPURT__")
            text = f"{wrong[0]} has no effect: it needs two underscores after GPURT"
            return Finding("problem", "flag", text, f"set {right} instead")
        text = "not set here: a program that does not set it runs as without dask_gpurt"
        remedy = "set DASK_GPURT__ENABLED=true, or start the program with `dask gpurt run`"
        return Finding("note", "flag", text, remedy)
    try:
        if setting_values.flag(lambda key: value, "enabled"):
            return Finding("ok", "flag", f"on, by {where}")
    except ConfigError as error:
        return Finding("problem", "flag", f"in {where}, {error}", "correct it there")
    return Finding("note", "flag", f"off, by {where} ({value!r})", "set it to true there")


def settings() -> Finding:
    """Check whether all settings are valid, and the description file, if one is set."""
    given = (*dask.config.collect_yaml(dask.config.paths), dask.config.collect_env())
    for section in (one.get("gpurt") for one in given):
        # Dask replaces such a value with our defaults, so `config.read` cannot see it.
        if section is not None and not isinstance(section, Mapping):
            text = f"gpurt is {section!r}, so it has no effect; it must be a section of settings"
            remedy = "write `gpurt: {enabled: true}` in YAML, or set DASK_GPURT__ENABLED=true"
            return Finding("problem", "settings", text, remedy)
    try:
        topology = config.read().topology
        if topology.text is not None:
            description.parse(topology.text, topology.file or "topology")
    except ConfigError as error:
        return Finding("problem", "settings", str(error), "correct the setting")
    return Finding("ok", "settings", "all values are valid")


def preloads() -> list[Finding]:
    """Check whether Dask loads our preload for clients and schedulers."""
    found = []
    kept = config.preloads()
    missing = [role for role, is_there in kept.items() if not is_there]
    if not missing:
        return [Finding("ok", "preload", "listed for clients and schedulers")]
    if not any(_is_ours(path) for path in _files_with("gpurt.enabled")):
        text = f"Dask does not find {config.DEFAULTS_PATH.name}, which lists {config.PRELOAD}"
        directory = Path(sys.prefix) / "etc" / "dask"
        remedy = f"install dask-gpurt with pip, or copy {config.DEFAULTS_PATH} into {directory}"
        return [Finding("problem", "preload", text, remedy)]
    for role in missing:
        key = f"distributed.{role}.preload"
        where = _place_of(key) or "the configuration"
        text = f"{where} replaces the list {key}, which has lost {config.PRELOAD}"
        remedy = f"add {config.PRELOAD} to {key} there, and [] to {key}-argv if that is set"
        found.append(Finding("problem", "preload", text, remedy))
    return found


def unknown_keys() -> list[Finding]:
    """Find settings that nothing reads."""
    found = []
    try:
        keys = config.unknown_keys()
    except ConfigError:
        return []  # `settings` reports it
    for key, suggestion in keys:
        hint = f"did you mean gpurt.{suggestion}?" if suggestion else "remove it"
        found.append(Finding("problem", "settings", f"nothing reads gpurt.{key}", hint))
    return found


def system() -> list[Finding]:
    """Check what workers would find in this system."""
    from dask_gpurt.plugins import bootstrap

    if (problem := bootstrap.system_problem()) is not None:
        return [Finding("note", "system", problem)]
    return [huge_pages(), open_files()]


def huge_pages() -> Finding:
    """Check what the kernel does for buffers that ask for huge pages."""
    from dask_gpurt.devices.host_memory import pages

    if not pages.work_here():
        text = "no page can be moved in this system: shuffles work, but take longer"
        return Finding("note", "memory", text)
    policy = pages.system_policy()
    if policy in ("always", "madvise"):
        return Finding("ok", "huge pages", f"{policy}: shuffle buffers use them")
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    remedy = f"as root: echo madvise > {path}"
    return Finding("note", "huge pages", f"{policy}: shuffles work, but take longer", remedy)


def open_files() -> Finding:
    """Check for how many workers the open files of a process are enough."""
    from dask_gpurt.plugins.shuffle import peer_connections

    _, most = peer_connections.open_files()
    n_workers = peer_connections.most_workers(most)
    text = f"up to {most:,}: enough for shuffles between {n_workers:,} workers"
    if most >= _FEW_FILES:
        return Finding("ok", "open files", text)
    remedy = f"to use more workers, raise the hard limit: ulimit -Hn {_FEW_FILES}, or your service"
    return Finding("note", "open files", text, remedy)


def array_expressions() -> list[Finding]:
    """Check whether reductions of arrays have the layers that the runtime knows."""
    if not dask.config.get("array.query-planning", False):
        return []
    text = "array expressions are on: stock Dask combines the results of large reductions"
    return [Finding("note", "arrays", text, "set array.query-planning to false")]


def gpu() -> Finding:
    """Report how far the runtime was tested with GPUs."""
    text = (
        "tested on one GPU of NVIDIA (H100, H200) with two workers; AMD's GPUs over a stand-in for "
        "the driver, and several GPUs not at all"
    )
    return Finding("note", "gpu", text)


def _place_of(key: str) -> str | None:
    """Return where a user has set a key, in words; None if nowhere."""
    if (name := _variable(key)) is not None:
        return f"the environment variable {name}"
    files = [path for path in _files_with(key) if not _is_ours(path)]
    return str(files[-1]) if files else None


def _variable(key: str) -> str | None:
    """Return the environment variable that sets a key, by Dask's rules."""
    wanted = key.replace("-", "_").replace(".", "__")
    for name in os.environ:
        if name.startswith("DASK_") and name[5:].lower() == wanted:
            return name
    return None


def _files_with(key: str) -> list[Path]:
    """Return the configuration files that set a key. The last one takes effect."""
    found: list[Path] = []
    for path in dask.config.paths:
        # Dask raises for a file without keys, or with a value in place of a section.
        with contextlib.suppress(TypeError):
            found += dask.config.paths_containing_key(key, paths=[path])
    return found


def _is_ours(path: Path) -> bool:
    """Return whether a configuration file is a copy of our defaults."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(content, dict) and content.get("gpurt") == config.defaults()
