"""Settings: what the defaults are, what may be written, and what is said about the rest."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace

import dask.config
import pytest
import yaml

from dask_gpurt import config
from dask_gpurt.config import (
    DeviceSettings,
    MemorySettings,
    PlacementSettings,
    Settings,
    ShuffleSettings,
    TopologySettings,
)
from dask_gpurt.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

DEFAULTS = Settings(
    enabled=False,
    strict=False,
    shuffle=ShuffleSettings(
        transport="auto",
        compression="auto",
        memory=0.3,
        message_nbytes=8 * MIB,
        in_flight_nbytes=32 * MIB,
        overlap=True,
    ),
    memory=MemorySettings(
        enabled=True,
        policy="next-use",
        directory=None,
        disk_limit_nbytes=None,
        compression="none",
        compressed_nbytes=None,
        device=0.6,
        replace_dask_cuda=False,
    ),
    devices=DeviceSettings(shape_launches=False),
    placement=PlacementSettings(enabled=True, policy="auto"),
    topology=TopologySettings(file=None, text=None, probe="auto"),
)


@pytest.fixture(autouse=True)
def pristine():
    """Dask's configuration as it is where nobody has set anything of ours."""
    with dask.config.set(gpurt=copy.deepcopy(dict(config.defaults()))):
        yield


@pytest.fixture
def warnings(caplog):
    """What was logged about settings so far."""
    caplog.set_level(logging.WARNING, "dask_gpurt")
    return lambda: caplog.messages


def _environment(**variables):
    """The `gpurt` section of a program with these environment variables."""
    env = {f"DASK_{name}": value for name, value in variables.items()}
    return dask.config.collect(paths=[str(config.DEFAULTS_PATH)], env=env)["gpurt"]


# ------------------------------------------------------------------ defaults and schema


def _leaves(section, prefix=""):
    found = {}
    for name, value in section.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _schema_leaves(section, prefix=""):
    found = {}
    for name, entry in section["properties"].items():
        if "properties" in entry:
            found |= _schema_leaves(entry, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = entry
    return found


def _schema_sections(section):
    yield section
    for entry in section["properties"].values():
        if "properties" in entry:
            yield from _schema_sections(entry)


def test_defaults_and_schema_have_the_same_keys():
    assert set(_leaves(config.defaults())) == set(_schema_leaves(config.schema()))


def test_every_key_has_a_type_and_a_description():
    for key, entry in _schema_leaves(config.schema()).items():
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
    defaults = _leaves(config.defaults())
    for key, entry in _schema_leaves(config.schema()).items():
        names = [entry["type"]] if isinstance(entry["type"], str) else entry["type"]
        assert any(isinstance(defaults[key], types[name]) for name in names), key
        if isinstance(defaults[key], bool):
            assert names == ["boolean"], key


def test_every_setting_is_read():
    """One that nobody reads would be ignored without a word."""
    changed = {"enabled": True, "strict": True}
    changed |= {
        "shuffle.transport": "comm",
        "shuffle.compression": "lz4",
        "shuffle.memory": 0.5,
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
        "devices.shape-launches": True,
        "placement.enabled": False,
        "placement.policy": "stock",
        "topology.file": str(config.DEFAULTS_PATH),
        "topology.probe": "off",
    }
    assert set(changed) == set(_leaves(config.defaults()))
    for key, value in changed.items():
        with dask.config.set({f"gpurt.{key}": value}):
            assert config.read() != DEFAULTS, key


def test_the_defaults_file_lists_the_preload_for_every_role():
    distributed = yaml.safe_load(config.DEFAULTS_PATH.read_text())["distributed"]
    assert set(distributed) == {"client", "scheduler"}
    for role in distributed.values():
        assert role == {"preload": [config.PRELOAD]}


# ------------------------------------------------------------------ reading


def test_reading_the_defaults(warnings):
    assert config.read() == DEFAULTS
    assert warnings() == []


def test_reading_where_dask_found_no_defaults(warnings):
    with dask.config.set(gpurt={}):
        assert config.read() == DEFAULTS
    assert warnings() == []


@pytest.mark.parametrize("section", [{"strict": True}, {"shuffle": {"memory": 0.5}}])
def test_reading_half_a_section(section):
    with dask.config.set(gpurt=section):
        settings = config.read()
    assert settings.strict == section.get("strict", False)
    assert settings.shuffle.memory == section.get("shuffle", {}).get("memory", 0.3)
    assert settings.shuffle.message_nbytes == 8 * MIB


@pytest.mark.parametrize("section", [None, {"shuffle": None, "devices": None}])
def test_an_empty_section_of_a_file_means_the_defaults(warnings, section):
    """`gpurt:` with everything below it commented out."""
    with dask.config.set(gpurt=section):
        assert config.read() == DEFAULTS
    assert warnings() == []


@pytest.mark.parametrize("key", ["shuffle.memory", "memory.device"])
def test_shares_and_sizes(key):
    def read(value):
        with dask.config.set({f"gpurt.{key}": value}):
            settings = config.read()
        section, name = key.split(".")
        return getattr(getattr(settings, section), name)

    assert [read(value) for value in (0.4, "0.4", 1, 4096, "4 KiB")] == [0.4, 0.4, 1, 4096, 4096]
    # A share of more than all, a percentage.
    for value in (1.5, "1.5", 30, 1023, 0, -1, True):
        with pytest.raises(ConfigError, match="may be a share"):
            read(value)


@pytest.mark.parametrize("section", [1, "yes", True, ["enabled"]])
def test_a_section_that_is_none_is_refused(section):
    with dask.config.set(gpurt=section), pytest.raises(ConfigError, match="gpurt"):
        config.read()


@pytest.mark.parametrize("key", ["enabled", "strict"])
@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        *[(value, True) for value in (True, "true", "True", "YES", " on ", 1, "1")],
        *[(value, False) for value in (False, "false", "no", "Off", 0, "0")],
    ],
)
def test_flags(key, value, meaning):
    with dask.config.set({f"gpurt.{key}": value}):
        settings = config.read()
    assert getattr(settings, key) is meaning
    other = {"enabled": "strict", "strict": "enabled"}[key]
    assert getattr(settings, other) is False


@pytest.mark.parametrize("key", ["enabled", "strict"])
@pytest.mark.parametrize("value", ["maybe", "", None, 2, -1, 0.5, [], {"on": 1}])
def test_flags_that_are_neither(key, value):
    with (
        dask.config.set({f"gpurt.{key}": value}),
        pytest.raises(ConfigError, match=rf"gpurt\.{key} is .*true or false"),
    ):
        config.read()


SIZES = {"shuffle.message-size": "message_nbytes", "shuffle.in-flight": "in_flight_nbytes"}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    ("value", "nbytes"),
    [("1 MiB", MIB), ("2MB", 2_000_000), ("1.5 KiB", 1536), ("77", 77), (1234, 1234), (1e6, 10**6)],
)
def test_sizes(key, value, nbytes):
    with dask.config.set({f"gpurt.{key}": value}):
        shuffle = config.read().shuffle
    assert getattr(shuffle, SIZES[key]) == nbytes
    assert type(getattr(shuffle, SIZES[key])) is int
    (other,) = set(SIZES.values()) - {SIZES[key]}
    assert getattr(shuffle, other) == getattr(DEFAULTS.shuffle, other)


NO_SIZES = [
    "much",
    "",
    None,
    0,
    -1,
    "0",
    "-4 MiB",
    0.4,
    [],
    {"a": 1},
    True,
    float("nan"),
    float("inf"),
    "1e999 MiB",
]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
def test_sizes_that_are_none(key, value):
    with (
        dask.config.set({f"gpurt.{key}": value}),
        pytest.raises(ConfigError, match=rf"gpurt\.{key} is .*a size"),
    ):
        config.read()


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0.3, 30 * GIB),
        ("0.25", 25 * GIB),
        (1, 100 * GIB),
        (1.0, 100 * GIB),
        ("4 GiB", 4 * GIB),
        ("500MB", 500_000_000),
        (12345678, 12345678),
        ("12345678", 12345678),
    ],
)
def test_memory_is_a_share_or_a_size(value, nbytes):
    with dask.config.set({"gpurt.shuffle.memory": value, "gpurt.memory.device": value}):
        settings = config.read()
    for nbytes_of in (settings.shuffle.memory_nbytes, settings.memory.device_nbytes):
        found = nbytes_of(100 * GIB)
        assert found == nbytes
        assert type(found) is int


NO_MEMORY = [
    "much",
    "",
    None,
    0,
    -0.1,
    "0",
    "-4 GiB",
    [],
    {"a": 1},
    True,
    float("nan"),
    float("inf"),
    "nan",
    "inf",
    "1e999",
]


@pytest.mark.parametrize("value", NO_MEMORY, ids=repr)
def test_memory_that_is_neither(value):
    with (
        dask.config.set({"gpurt.shuffle.memory": value}),
        pytest.raises(ConfigError, match=r"gpurt\.shuffle\.memory is"),
    ):
        config.read()


# ------------------------------------------------------------------ keys that nothing reads


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("enable", "enabled"),
        ("shuffle.mesage-size", "shuffle.message-size"),
        ("shuffle.in_flihgt", "shuffle.in-flight"),
        ("shufle.memory", "shuffle.memory"),
    ],
)
def test_a_misspelt_key_is_named_with_what_was_meant(warnings, key, suggestion):
    with dask.config.set({f"gpurt.{key}": 1}):
        assert config.read() == DEFAULTS
    (message,) = warnings()
    assert f"gpurt.{key.replace('_', '-')} " in message
    assert f"did you mean gpurt.{suggestion}?" in message


def test_a_key_that_resembles_none_is_named_alone(warnings):
    with dask.config.set({"gpurt.zzz": 1}):
        config.read()
    (message,) = warnings()
    assert "gpurt.zzz" in message
    assert "did you mean" not in message


def test_each_unknown_key_is_named(warnings):
    with dask.config.set({"gpurt.zzz": 1, "gpurt.shuffle.yyy": 2}):
        config.read()
        assert [key for key, _ in config.unknown_keys()] == ["shuffle.yyy", "zzz"]
    assert len(warnings()) == 2


def test_what_is_in_a_file_is_read_with_its_name(tmp_path):
    path = tmp_path / "machines.yaml"
    path.write_text("hosts: []  # für später", encoding="utf-8")
    with dask.config.set({"gpurt.topology.file": str(path)}):
        assert config.read().topology == TopologySettings(
            str(path), "hosts: []  # für später", "auto"
        )
    with dask.config.set({"gpurt.topology.file": ""}):
        assert config.read().topology == TopologySettings(None, None, "auto")


@pytest.mark.parametrize(
    ("value", "means"), [("on", "on"), ("auto", "auto"), (True, "on"), (False, "off")]
)
def test_words_that_yaml_reads_as_truth_values(value, means):
    with dask.config.set({"gpurt.topology.probe": value}):
        assert config.read().topology.probe == means


@pytest.mark.parametrize("value", ["always", None])
def test_a_word_that_is_no_choice(value):
    with dask.config.set({"gpurt.topology.probe": value}):
        with pytest.raises(ConfigError, match=rf"gpurt\.topology\.probe is {value!r}.*auto or on"):
            config.read()


@pytest.mark.parametrize("value", ["no/such/file", 3, True, ["a"], "a\0b"])
def test_a_file_that_cannot_be_read(value):
    with (
        dask.config.set({"gpurt.topology.file": value}),
        pytest.raises(ConfigError, match=r"gpurt\.topology\.file is"),
    ):
        config.read()


# ------------------------------------------------------------------ environment variables


def test_environment_variables(warnings):
    section = _environment(
        GPURT__ENABLED="true",
        GPURT__STRICT="1",
        GPURT__SHUFFLE__MEMORY="0.5",
        GPURT__SHUFFLE__MESSAGE_SIZE="1 MiB",
        GPURT__SHUFFLE__IN_FLIGHT="2000000",
        GPURT__SHUFFLE__OVERLAP="no",
        GPURT__MEMORY__ENABLED="no",
        GPURT__MEMORY__POLICY="lru",
        GPURT__MEMORY__DIRECTORY="/scratch",
        GPURT__MEMORY__DISK_LIMIT="5 MiB",
        GPURT__MEMORY__COMPRESSION="zstd",
        GPURT__MEMORY__COMPRESSED="1 MiB",
        GPURT__MEMORY__DEVICE="2 GB",
        GPURT__MEMORY__REPLACE_DASK_CUDA="on",
        GPURT__DEVICES__SHAPE_LAUNCHES="on",
    )
    with dask.config.set(gpurt=section):
        assert config.read() == replace(
            DEFAULTS,
            enabled=True,
            strict=True,
            shuffle=ShuffleSettings("auto", "auto", 0.5, MIB, 2_000_000, False),
            memory=MemorySettings(False, "lru", "/scratch", 5 * MIB, "zstd", MIB, 2e9, True),
            devices=DeviceSettings(shape_launches=True),
        )
    assert warnings() == []


WORDS = [
    (key, word)
    for key, entry in _schema_leaves(config.schema()).items()
    for word in entry.get("enum", ())
]


@pytest.mark.parametrize(("key", "word"), WORDS)
def test_every_word_can_be_said_in_the_environment(key, word):
    """Dask makes other things than words of some, as of `none`."""
    name = f"GPURT__{key}".replace(".", "__").replace("-", "_").upper()
    with dask.config.set(gpurt=_environment(**{name: word})):
        assert _leaves(config.read().to_plain())[key] == word


@pytest.mark.parametrize("word", ["True", "TRUE", "yes", "on"])
def test_spellings_of_the_flag(word):
    with dask.config.set(gpurt=_environment(GPURT__ENABLED=word)):
        assert config.read().enabled is True


def test_environment_variables_where_dask_found_no_defaults(warnings):
    section = dask.config.collect(paths=[], env={"DASK_GPURT__SHUFFLE__MESSAGE_SIZE": "1 MiB"})
    with dask.config.set(gpurt=section["gpurt"]):
        assert config.read().shuffle.message_nbytes == MIB
    assert warnings() == []


def test_a_misspelt_environment_variable(warnings):
    with dask.config.set(gpurt=_environment(GPURT__SHUFFLE__MESAGE_SIZE="1 MiB")):
        config.read()
    (message,) = warnings()
    assert "did you mean gpurt.shuffle.message-size?" in message


# ------------------------------------------------------------------ on the way to a cluster


def test_settings_survive_the_way_to_a_cluster():
    settings = replace(
        DEFAULTS,
        enabled=True,
        strict=True,
        shuffle=ShuffleSettings("comm", "zstd", 5e9, 7, 11, False),
        placement=PlacementSettings(False, "stock"),
        topology=TopologySettings("machines.yaml", "hosts: []", "off"),
        memory=MemorySettings(True, "largest", None, None, "lz4", None, 2e9, False),
        devices=DeviceSettings(shape_launches=True),
    )
    plain = settings.to_plain()
    assert _leaves(plain) == {
        "enabled": True,
        "strict": True,
        "shuffle.transport": "comm",
        "shuffle.compression": "zstd",
        "shuffle.memory": 5e9,
        "shuffle.message_nbytes": 7,
        "shuffle.in_flight_nbytes": 11,
        "shuffle.overlap": False,
        "memory.enabled": True,
        "memory.policy": "largest",
        "memory.directory": None,
        "memory.disk_limit_nbytes": None,
        "memory.compression": "lz4",
        "memory.compressed_nbytes": None,
        "memory.device": 2e9,
        "memory.replace_dask_cuda": False,
        "devices.shape_launches": True,
        "placement.enabled": False,
        "placement.policy": "stock",
        "topology.file": "machines.yaml",
        "topology.text": "hosts: []",
        "topology.probe": "off",
    }
    assert Settings.from_plain(plain) == settings
    assert Settings.from_plain(pickle.loads(pickle.dumps(plain))) == settings


@pytest.mark.parametrize("size", ["2 B", "700 B", "4 KiB", 0.25, 1.0])
def test_sizes_and_shares_arrive_as_they_were_read(size):
    with dask.config.set({"gpurt.shuffle.memory": size, "gpurt.memory.device": size}):
        settings = config.read()
    assert Settings.from_plain(settings.to_plain()) == settings


def test_settings_do_not_change_once_they_are_read():
    settings = config.read()
    with dask.config.set({"gpurt.strict": True}):
        assert settings.strict is False
    with pytest.raises(AttributeError):
        settings.strict = True


# ------------------------------------------------------------------ preloads

ROLES = ("client", "scheduler")


def _preloads(**lists):
    return dask.config.set({f"distributed.{role}.preload": value for role, value in lists.items()})


def test_preloads_that_are_all_there():
    with _preloads(**{role: [config.PRELOAD] for role in ROLES}):
        assert config.preloads() == dict.fromkeys(ROLES, True)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("replacement", [["my_module"], [], None])
def test_a_preload_that_somebody_replaced(role, replacement):
    lists = {name: [config.PRELOAD] for name in ROLES} | {role: replacement}
    with _preloads(**lists):
        assert config.preloads() == dict.fromkeys(ROLES, True) | {role: False}


def test_a_preload_beside_one_of_the_users():
    with _preloads(**{role: ["my_module", config.PRELOAD] for role in ROLES}):
        assert config.preloads() == dict.fromkeys(ROLES, True)


def test_preloads_that_were_never_there():
    with dask.config.set(distributed={}):
        assert config.preloads() == dict.fromkeys(ROLES, False)
