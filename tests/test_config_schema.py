"""The defaults of all settings and their schema agree."""

from __future__ import annotations

import dask.config
import yaml

from dask_gpurt import config, preload
from tests.config_cases import DEFAULTS, leaves, schema_leaves

# ------------------------------------------------------------------ defaults and schema


def _schema_sections(section):
    yield section
    for entry in section["properties"].values():
        if "properties" in entry:
            yield from _schema_sections(entry)


def test_defaults_and_schema_have_the_same_keys():
    assert set(leaves(config.defaults())) == set(schema_leaves(config.schema()))


def test_every_key_has_a_type_and_a_description():
    for key, entry in schema_leaves(config.schema()).items():
        assert entry.get("type"), key
        assert entry.get("description", "").strip().endswith("."), key


def test_every_section_is_closed_and_described():
    for section in _schema_sections(config.schema()):
        assert section["type"] == "object"
        assert section["additionalProperties"] is False
        assert section["description"].strip()


def test_defaults_have_the_types_of_the_schema():
    types = {"boolean": bool, "string": str, "number": (int, float), "integer": int}
    types["null"] = type(None)
    defaults = leaves(config.defaults())
    for key, entry in schema_leaves(config.schema()).items():
        names = [entry["type"]] if isinstance(entry["type"], str) else entry["type"]
        assert any(isinstance(defaults[key], types[name]) for name in names), key
        if isinstance(defaults[key], bool):
            assert names == ["boolean"], key


def test_the_preload_knows_all_sections():
    assert set(config.defaults()) == preload.KNOWN


def test_every_setting_is_read():
    """A setting that no code reads would be ignored silently."""
    changed = {"enabled": True, "strict": True}
    changed |= {
        "shuffle.transport": "comm",
        "shuffle.routing": "direct",
        "shuffle.compression": "lz4",
        "shuffle.memory": 0.5,
        "shuffle.device": 0.5,
        "shuffle.message-size": 5,
        "shuffle.in-flight": 6,
        "shuffle.overlap": False,
        "memory.enabled": False,
        "memory.policy": "lru",
        "memory.directory": "/scratch",
        "memory.disk-limit": "1 GiB",
        "memory.compression": "lz4",
        "memory.compressed": "1 GiB",
        "memory.device": 0.5,
        "memory.replace-dask-cuda": True,
        "placement.enabled": False,
        "placement.policy": "stock",
        "collectives.enabled": False,
        "collectives.order": "any",
        "topology.file": str(config.DEFAULTS_PATH),
        "topology.probe": "off",
        "trace.limit": 7,
    }
    assert set(changed) == set(leaves(config.defaults()))
    for key, value in changed.items():
        with dask.config.set({f"gpurt.{key}": value}):
            assert config.read() != DEFAULTS, key


def test_the_defaults_file_lists_the_preload_for_every_role():
    distributed = yaml.safe_load(config.DEFAULTS_PATH.read_text())["distributed"]
    assert set(distributed) == {"client", "scheduler"}
    for role in distributed.values():
        assert role == {"preload": [config.PRELOAD]}
