"""Settings of the package: Dask's configuration in, frozen `Settings` out.

This is the only module that reads `gpurt.*` keys. Defaults are in `gpurt.yaml`, which Dask finds in
the environment's prefix once the package is installed. Types and meanings are in
`gpurt-schema.yaml`. Settings are read once, in the process with the flag, and travel with the
plugins from there.
"""

from __future__ import annotations

import difflib
import logging
import math
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import dask.config
import yaml

from dask_gpurt import setting_values as values
from dask_gpurt.errors import ConfigError
from dask_gpurt.setting_values import AUTO, Get, amount_nbytes

logger = logging.getLogger("dask_gpurt")

_HERE = pathlib.Path(__file__).parent
DEFAULTS_PATH = _HERE / "gpurt.yaml"
SCHEMA_PATH = _HERE / "gpurt-schema.yaml"
#: The loader in C takes a tenth of the time. Some builds of PyYAML lack it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PRELOAD = "dask_gpurt.preload"
#: Most characters in a description of machines, as in `topology.description`.
MAX_DESCRIPTION = 2**24

#: `gpurt.shuffle.in-flight: auto` is this share of the worker's memory limit.
_IN_FLIGHT_SHARE = 0.05
_LEAST_IN_FLIGHT_NBYTES = 64 << 20


@dataclass(frozen=True)
class ShuffleSettings:
    """Settings of the shuffle.

    Attributes
    ----------
    transport
        `auto`, `ucx`, or `comm` (only Dask's own connections).
    routing
        `direct`, `two-level` through one worker of the other host, or `auto`.
    compression
        `auto` compresses where it pays, `lz4` and `zstd` everywhere, `none` nowhere.
    memory
        Share of the worker's memory limit (at most 1.0), or bytes.
    device
        Share of a GPU's memory (at most 1.0), or bytes.
    message_nbytes
        Size of a message.
    in_flight
        Most bytes that wait to be sent by one worker, to all peers; or `AUTO`.
    overlap
        Whether tasks continue while their output is encoded and sent.
    """

    transport: str
    routing: Literal["auto", "direct", "two-level"]
    compression: Literal["auto", "none", "lz4", "zstd"]
    memory: float
    device: float
    message_nbytes: int
    in_flight: int | Literal["auto"]
    overlap: bool

    def memory_nbytes(self, worker_limit_nbytes: int) -> int:
        """Return the bytes that shards may use on a worker with this memory limit."""
        return amount_nbytes(self.memory, worker_limit_nbytes)

    def in_flight_nbytes(self, worker_limit_nbytes: int) -> int:
        """Return the bytes that may wait to be sent by a worker with this memory limit."""
        if self.in_flight == AUTO:
            return max(_LEAST_IN_FLIGHT_NBYTES, int(_IN_FLIGHT_SHARE * worker_limit_nbytes))
        return self.in_flight

    def device_nbytes(self, total_nbytes: int) -> int:
        """Return the bytes that shards may use on a GPU with this much memory."""
        return amount_nbytes(self.device, total_nbytes)


@dataclass(frozen=True)
class MemorySettings:
    """Settings of the store for task outputs.

    Attributes
    ----------
    policy
        Name of an eviction policy.
    directory
        Directory for spilled values. None uses the worker's local directory.
    disk_limit_nbytes
        None uses Dask's own limit.
    compression
        Coder for values on disk.
    compressed_nbytes
        Memory for compressed values. None disables that tier.
    device
        Share of a GPU's memory (at most 1.0), or bytes.
    """

    enabled: bool
    policy: str
    directory: str | None
    disk_limit_nbytes: int | None
    compression: Literal["none", "lz4", "zstd"]
    compressed_nbytes: int | None
    device: float
    replace_dask_cuda: bool

    def device_nbytes(self, total_nbytes: int) -> int:
        """Return the bytes that values may use on a GPU with this much memory."""
        return amount_nbytes(self.device, total_nbytes)


@dataclass(frozen=True)
class PlacementSettings:
    """Settings of task placement.

    Attributes
    ----------
    enabled
        Whether the runtime takes part in placement.
    policy
        `data-aware`, `stock` (Dask's own decisions, with explanations), or `auto`.
    """

    enabled: bool
    policy: Literal["auto", "data-aware", "stock"]


@dataclass(frozen=True)
class CollectiveSettings:
    """Settings of collective operations.

    Attributes
    ----------
    enabled
        Whether there are broadcasts, replicas that stay, sliced reductions, and groups of ranks.
    order
        "stock" or "any": the order in which reductions combine floats.
    """

    enabled: bool
    order: str


@dataclass(frozen=True)
class TraceSettings:
    """Settings of traces.

    Attributes
    ----------
    limit_nbytes
        Most bytes that each worker records.
    """

    limit_nbytes: int


#: The value of `gpurt.topology.file` for machines that workers report.
DISCOVERED = "auto"


@dataclass(frozen=True)
class TopologySettings:
    """Settings of the machine topology.

    Attributes
    ----------
    file
        Name of the description file, for messages; `DISCOVERED` if workers report the machines.
    text
        Content of the file, read in the process with the flag. Other processes may lack the file.
    probe
        Whether to measure links as workers join.
    """

    file: str | None
    text: str | None
    probe: Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Settings:
    """All settings under `gpurt.`, parsed and validated."""

    enabled: bool
    strict: bool
    shuffle: ShuffleSettings
    memory: MemorySettings
    placement: PlacementSettings
    collectives: CollectiveSettings
    topology: TopologySettings
    trace: TraceSettings

    def to_plain(self) -> dict[str, Any]:
        """Return the settings as plain values, for a message."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Any) -> Settings:
        """Return settings that came in a message, validated like the configuration.

        Raises
        ------
        ConfigError
            A value is invalid, missing or unknown.
        """
        if not _has_fields(plain, Settings) or not all(
            _has_fields(plain[name], kind) for name, kind in _SECTIONS.items()
        ):
            raise ConfigError("the settings in the message are of another version of dask_gpurt")
        file, text = plain["topology"]["file"], plain["topology"]["text"]
        for value in (file, text):
            if value is not None and not (isinstance(value, str) and len(value) <= MAX_DESCRIPTION):
                raise ConfigError(
                    f"gpurt.topology.file is no text of at most {MAX_DESCRIPTION:,} characters"
                )

        def get(key: str) -> Any:
            found: Any = plain
            for name in _FIELDS.get(key, key.replace("-", "_")).split("."):
                found = found[name]
            if isinstance(found, float) and 1 < found < math.inf:
                # A size that was parsed already. As a plain number it would be taken for a share
                # above 1.
                return f"{found:.0f} B"
            return found

        return _parsed(get, file, text)


_SECTIONS: dict[str, type[Any]] = {
    "shuffle": ShuffleSettings,
    "memory": MemorySettings,
    "placement": PlacementSettings,
    "collectives": CollectiveSettings,
    "topology": TopologySettings,
    "trace": TraceSettings,
}
#: Attribute of `Settings` for each key with another name.
_FIELDS = {
    "shuffle.message-size": "shuffle.message_nbytes",
    "memory.disk-limit": "memory.disk_limit_nbytes",
    "memory.compressed": "memory.compressed_nbytes",
    "trace.limit": "trace.limit_nbytes",
}


def _has_fields(plain: Any, kind: type[Any]) -> bool:
    return isinstance(plain, Mapping) and plain.keys() == {one.name for one in fields(kind)}


@lru_cache(1)
def defaults() -> Mapping[str, Any]:
    """Return the `gpurt` section of the defaults file."""
    section: Mapping[str, Any] = yaml.load(DEFAULTS_PATH.read_text(), _LOADER)["gpurt"]
    return section


@lru_cache(1)
def schema() -> Mapping[str, Any]:
    """Return the JSON schema of the `gpurt` section."""
    found: Mapping[str, Any] = yaml.load(SCHEMA_PATH.read_text(), _LOADER)["properties"]["gpurt"]
    return found


def read() -> Settings:
    """Return the settings in Dask's current configuration.

    Raises
    ------
    ConfigError
        A value is invalid. The message names the key and its valid values.
    """
    warn_of_unknown()
    return _parsed(_get, *_text("topology.file"))


def _parsed(get: Get, file: str | None, text: str | None) -> Settings:
    return Settings(
        enabled=values.flag(get, "enabled"),
        strict=values.flag(get, "strict"),
        shuffle=ShuffleSettings(
            transport=_choice(get, "shuffle.transport"),
            routing=_choice(get, "shuffle.routing"),
            compression=_choice(get, "shuffle.compression"),
            memory=values.share_or_nbytes(get, "shuffle.memory"),
            device=values.share_or_nbytes(get, "shuffle.device"),
            message_nbytes=values.nbytes(get, "shuffle.message-size"),
            in_flight=values.auto_or_nbytes(get, "shuffle.in-flight"),
            overlap=values.flag(get, "shuffle.overlap"),
        ),
        memory=MemorySettings(
            enabled=values.flag(get, "memory.enabled"),
            policy=_choice(get, "memory.policy"),
            directory=values.directory(get, "memory.directory"),
            disk_limit_nbytes=values.optional_nbytes(get, "memory.disk-limit"),
            compression=_choice(get, "memory.compression"),
            compressed_nbytes=values.optional_nbytes(get, "memory.compressed"),
            device=values.share_or_nbytes(get, "memory.device"),
            replace_dask_cuda=values.flag(get, "memory.replace-dask-cuda"),
        ),
        placement=PlacementSettings(
            enabled=values.flag(get, "placement.enabled"),
            policy=_choice(get, "placement.policy"),
        ),
        collectives=CollectiveSettings(
            enabled=values.flag(get, "collectives.enabled"),
            order=_choice(get, "collectives.order"),
        ),
        topology=TopologySettings(
            file, text, probe=values.switch(get, "topology.probe", _allowed("topology.probe"))
        ),
        trace=TraceSettings(values.nbytes(get, "trace.limit")),
    )


def warn_of_unknown() -> None:
    """Log each unknown key under `gpurt.`, with the known key that it resembles."""
    for key, suggestion in unknown_keys():
        hint = f"; did you mean gpurt.{suggestion}?" if suggestion else ""
        logger.warning("unknown setting gpurt.%s is ignored%s", key, hint)


def unknown_keys() -> list[tuple[str, str | None]]:
    """Return the unknown keys under `gpurt.`, each with the known key it resembles."""
    section = dask.config.get("gpurt", None)
    if not isinstance(section, Mapping | None):
        raise ConfigError(f"gpurt is {section!r}; it must be a section of settings")
    known = {_normal(key) for key in _flatten(defaults())}
    sections = {_normal(name) for name, value in defaults().items() if isinstance(value, Mapping)}
    given = {_normal(key) for key in _flatten(section or {})}
    # YAML reads a section whose settings are all commented out as `None`.
    given -= {name for name in sections if (section or {}).get(name, 0) is None}
    found = []
    for key in sorted(given - known):
        close = difflib.get_close_matches(key, known, n=1)
        found.append((key, close[0] if close else None))
    return found


def is_strict() -> bool:
    """Return whether `gpurt.strict` is set. True if the setting is invalid."""
    try:
        return values.flag(_get, "strict")
    except ConfigError:
        return True


def shuffle_memory() -> float | None:
    """Return `gpurt.shuffle.memory`, a share or bytes; None if the setting is invalid."""
    try:
        return values.share_or_nbytes(_get, "shuffle.memory")
    except ConfigError:
        return None


def preload_list(role: str) -> list[str]:
    """Return the preloads of a client or a scheduler. Dask also accepts a single name."""
    value = dask.config.get(f"distributed.{role}.preload", None) or []
    return list(value) if isinstance(value, (list, tuple)) else [str(value)]


def preloads() -> dict[str, bool]:
    """Return whether each role's preload list has ours. A user's own list replaces ours."""
    return {role: PRELOAD in preload_list(role) for role in ("client", "scheduler")}


def _normal(key: str) -> str:
    return key.replace("_", "-")


def _flatten(section: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in section.items():
        if isinstance(value, Mapping):
            keys += _flatten(value, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _get(key: str) -> Any:
    default: Any = defaults()
    for name in key.split("."):
        default = default[name]
    return dask.config.get(f"gpurt.{key}", default)


def _allowed(key: str) -> list[str]:
    section = schema()
    for name in key.split("."):
        section = section["properties"][name]
    return list(section["enum"])


def _choice(get: Get, key: str) -> Any:
    return values.choice(get, key, _allowed(key))


def _text(key: str) -> tuple[str | None, str | None]:
    """Return the name and the content of a file."""
    name = _get(key)
    if name is None or name == "":
        return None, None
    if not isinstance(name, str):
        raise ConfigError(
            f"gpurt.{key} is {name!r}; it may be the name of a file, {DISCOVERED!r}, or null"
        )
    if name == DISCOVERED:
        return DISCOVERED, None
    try:
        text = pathlib.Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # the last one if nobody has that home
        raise ConfigError(f"gpurt.{key} is {name!r}, which cannot be read: {error}") from None
    if len(text) > MAX_DESCRIPTION:
        raise ConfigError(
            f"gpurt.{key} is {name!r}, which is longer than {MAX_DESCRIPTION} characters"
        )
    return name, text
