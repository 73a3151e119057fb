"""Valid settings are read from every source; invalid ones cause a clear error or warning."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace

import dask.config
import pytest

from dask_gpurt import config
from dask_gpurt.config import (
    CollectiveSettings,
    MemorySettings,
    PlacementSettings,
    Settings,
    ShuffleSettings,
    TopologySettings,
)
from dask_gpurt.errors import ConfigError
from tests.config_cases import DEFAULTS, GIB, MIB, leaves, schema_leaves


@pytest.fixture(autouse=True)
def pristine():
    """Set Dask's configuration to our defaults alone."""
    with dask.config.set(gpurt=copy.deepcopy(dict(config.defaults()))):
        yield


@pytest.fixture
def warnings(caplog):
    """Return a function that lists warnings about settings so far."""
    caplog.set_level(logging.WARNING, "dask_gpurt")
    return lambda: caplog.messages


def _environment(**variables):
    """The `gpurt` section of a program with these environment variables."""
    env = {f"DASK_{name}": value for name, value in variables.items()}
    return dask.config.collect(paths=[str(config.DEFAULTS_PATH)], env=env)["gpurt"]


# ------------------------------------------------------------------ reading


def test_defaults_are_read(warnings):
    assert config.read() == DEFAULTS
    assert warnings() == []


def test_defaults_are_read_without_the_file_in_dask(warnings):
    with dask.config.set(gpurt={}):
        assert config.read() == DEFAULTS
    assert warnings() == []


@pytest.mark.parametrize("section", [{"strict": True}, {"shuffle": {"memory": 0.5}}])
def test_incomplete_section_gets_defaults(section):
    with dask.config.set(gpurt=section):
        settings = config.read()
    assert settings.strict == section.get("strict", False)
    assert settings.shuffle.memory == section.get("shuffle", {}).get("memory", 0.3)
    assert settings.shuffle.message_nbytes == 8 * MIB


@pytest.mark.parametrize("section", [None, {"shuffle": None, "memory": None}])
def test_empty_section_means_the_defaults(warnings, section):
    """A YAML file has `gpurt:` with all keys below it commented out."""
    with dask.config.set(gpurt=section):
        assert config.read() == DEFAULTS
    assert warnings() == []


@pytest.mark.parametrize("key", ["shuffle.memory", "memory.device"])
def test_shares_and_sizes_are_read(key):
    def read(value):
        with dask.config.set({f"gpurt.{key}": value}):
            settings = config.read()
        section, name = key.split(".")
        return getattr(getattr(settings, section), name)

    assert [read(value) for value in (0.4, "0.4", 1, 4096, "4 KiB")] == [0.4, 0.4, 1, 4096, 4096]
    # a share above 1, a percentage, a single byte, and a size that no message can hold
    for value in (1.5, "1.5", 30, 1023, 0, -1, True, "1 B", 1e20, "1e20", 2**63):
        with pytest.raises(ConfigError, match="may be a share"):
            read(value)


@pytest.mark.parametrize("section", [1, "yes", True, ["enabled"]])
def test_value_in_place_of_a_section_is_refused(section):
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
def test_flags_are_read(key, value, meaning):
    with dask.config.set({f"gpurt.{key}": value}):
        settings = config.read()
    assert getattr(settings, key) is meaning
    other = {"enabled": "strict", "strict": "enabled"}[key]
    assert getattr(settings, other) is False


@pytest.mark.parametrize("key", ["enabled", "strict"])
@pytest.mark.parametrize("value", ["maybe", "", None, 2, -1, 0.5, [], {"on": 1}])
def test_invalid_flags_are_refused(key, value):
    with (
        dask.config.set({f"gpurt.{key}": value}),
        pytest.raises(ConfigError, match=rf"gpurt\.{key} is .*true or false"),
    ):
        config.read()


SIZES = {"shuffle.message-size": "message_nbytes", "shuffle.in-flight": "in_flight"}


@pytest.mark.parametrize(
    ("memory_nbytes", "nbytes"), [(MIB, 64 * MIB), (1280 * MIB, 64 * MIB), (200 * GIB, 10 * GIB)]
)
def test_shards_in_flight_get_a_share_of_the_memory(memory_nbytes, nbytes):
    assert DEFAULTS.shuffle.in_flight_nbytes(memory_nbytes) == nbytes
    with dask.config.set({"gpurt.shuffle.in-flight": "3 MiB"}):
        assert config.read().shuffle.in_flight_nbytes(memory_nbytes) == 3 * MIB


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    ("value", "nbytes"),
    [("1 MiB", MIB), ("2MB", 2_000_000), ("1.5 KiB", 1536), ("77", 77), (1234, 1234), (1e6, 10**6)],
)
def test_sizes_are_read(key, value, nbytes):
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
    10**20,
    "8 EiB",
    float("inf"),
    "1e999 MiB",
]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", NO_SIZES, ids=repr)
def test_invalid_sizes_are_refused(key, value):
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
    "30%",
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
def test_invalid_memory_is_refused(value):
    with (
        dask.config.set({"gpurt.shuffle.memory": value}),
        pytest.raises(ConfigError, match=r"gpurt\.shuffle\.memory is .* a share \(0\.3\) or"),
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
def test_misspelt_key_is_named_with_a_suggestion(warnings, key, suggestion):
    with dask.config.set({f"gpurt.{key}": 1}):
        assert config.read() == DEFAULTS
    (message,) = warnings()
    assert f"gpurt.{key.replace('_', '-')} " in message
    assert f"did you mean gpurt.{suggestion}?" in message


def test_unknown_key_is_named_without_a_suggestion(warnings):
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


def test_description_file_is_read_with_its_name(tmp_path):
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
def test_yaml_truth_values_mean_on_and_off(value, means):
    with dask.config.set({"gpurt.topology.probe": value}):
        assert config.read().topology.probe == means


@pytest.mark.parametrize("value", ["always", None])
def test_invalid_choice_is_refused(value):
    with dask.config.set({"gpurt.topology.probe": value}):
        with pytest.raises(ConfigError, match=rf"gpurt\.topology\.probe is {value!r}.*auto or on"):
            config.read()


@pytest.mark.parametrize("value", ["no/such/file", "~nobody-here/file", 3, True, ["a"], "a\0b"])
def test_unreadable_file_is_refused(value):
    with (
        dask.config.set({"gpurt.topology.file": value}),
        pytest.raises(ConfigError, match=r"gpurt\.topology\.file is"),
    ):
        config.read()


# ------------------------------------------------------------------ environment variables


def test_environment_variables_are_read(warnings):
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
        GPURT__SHUFFLE__DEVICE="1 GB",
        GPURT__MEMORY__REPLACE_DASK_CUDA="on",
    )
    with dask.config.set(gpurt=section):
        assert config.read() == replace(
            DEFAULTS,
            enabled=True,
            strict=True,
            shuffle=replace(
                DEFAULTS.shuffle,
                memory=0.5,
                device=1e9,
                message_nbytes=MIB,
                in_flight=2_000_000,
                overlap=False,
            ),
            memory=MemorySettings(False, "lru", "/scratch", 5 * MIB, "zstd", MIB, 2e9, True),
        )
    assert warnings() == []


WORDS = [
    (key, word)
    for key, entry in schema_leaves(config.schema()).items()
    for word in entry.get("enum", ())
]


@pytest.mark.parametrize(("key", "word"), WORDS)
def test_every_choice_can_be_set_in_the_environment(key, word):
    """Dask parses some words into other values, such as `none`."""
    name = f"GPURT__{key}".replace(".", "__").replace("-", "_").upper()
    with dask.config.set(gpurt=_environment(**{name: word})):
        assert leaves(config.read().to_plain())[key] == word


@pytest.mark.parametrize("word", ["True", "TRUE", "yes", "on"])
def test_flag_has_several_spellings(word):
    with dask.config.set(gpurt=_environment(GPURT__ENABLED=word)):
        assert config.read().enabled is True


def test_environment_variables_work_without_the_defaults_file(warnings):
    section = dask.config.collect(paths=[], env={"DASK_GPURT__SHUFFLE__MESSAGE_SIZE": "1 MiB"})
    with dask.config.set(gpurt=section["gpurt"]):
        assert config.read().shuffle.message_nbytes == MIB
    assert warnings() == []


def test_misspelt_environment_variable_is_named(warnings):
    with dask.config.set(gpurt=_environment(GPURT__SHUFFLE__MESAGE_SIZE="1 MiB")):
        config.read()
    (message,) = warnings()
    assert "did you mean gpurt.shuffle.message-size?" in message


# ------------------------------------------------------------------ on the way to a cluster


def test_settings_survive_serialization():
    settings = replace(
        DEFAULTS,
        enabled=True,
        strict=True,
        shuffle=ShuffleSettings(
            transport="comm",
            routing="two-level",
            compression="zstd",
            memory=5e9,
            device=0.3,
            message_nbytes=7,
            in_flight=11,
            overlap=False,
        ),
        placement=PlacementSettings(False, "stock"),
        topology=TopologySettings("machines.yaml", "hosts: []", "off"),
        memory=MemorySettings(True, "largest", None, None, "lz4", None, 2e9, False),
        collectives=CollectiveSettings(enabled=False, order="any"),
    )
    plain = settings.to_plain()
    assert leaves(plain) == {
        "enabled": True,
        "strict": True,
        "shuffle.transport": "comm",
        "shuffle.routing": "two-level",
        "shuffle.compression": "zstd",
        "shuffle.memory": 5e9,
        "shuffle.device": 0.3,
        "shuffle.message_nbytes": 7,
        "shuffle.in_flight": 11,
        "shuffle.overlap": False,
        "memory.enabled": True,
        "memory.policy": "largest",
        "memory.directory": None,
        "memory.disk_limit_nbytes": None,
        "memory.compression": "lz4",
        "memory.compressed_nbytes": None,
        "memory.device": 2e9,
        "memory.replace_dask_cuda": False,
        "placement.enabled": False,
        "placement.policy": "stock",
        "collectives.enabled": False,
        "collectives.order": "any",
        "topology.file": "machines.yaml",
        "topology.text": "hosts: []",
        "topology.probe": "off",
        "trace.limit_nbytes": GIB,
    }
    assert Settings.from_plain(plain) == settings
    assert Settings.from_plain(pickle.loads(pickle.dumps(plain))) == settings


@pytest.mark.parametrize("size", ["2 B", "700 B", "4 KiB", 0.25, 1.0])
def test_sizes_and_shares_survive_serialization(size):
    with dask.config.set({"gpurt.shuffle.memory": size, "gpurt.memory.device": size}):
        settings = config.read()
    assert Settings.from_plain(settings.to_plain()) == settings


def test_settings_are_immutable():
    settings = config.read()
    with dask.config.set({"gpurt.strict": True}):
        assert settings.strict is False
    with pytest.raises(AttributeError):
        settings.strict = True


# ------------------------------------------------------------------ preloads


ROLES = ("client", "scheduler")


def _preloads(**lists):
    return dask.config.set({f"distributed.{role}.preload": value for role, value in lists.items()})


def test_complete_preload_lists_are_accepted():
    with _preloads(**{role: [config.PRELOAD] for role in ROLES}):
        assert config.preloads() == dict.fromkeys(ROLES, True)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("replacement", [["my_module"], [], None])
def test_replaced_preload_is_reported(role, replacement):
    lists = {name: [config.PRELOAD] for name in ROLES} | {role: replacement}
    with _preloads(**lists):
        assert config.preloads() == dict.fromkeys(ROLES, True) | {role: False}


def test_preload_beside_a_user_preload_is_accepted():
    with _preloads(**{role: ["my_module", config.PRELOAD] for role in ROLES}):
        assert config.preloads() == dict.fromkeys(ROLES, True)


def test_missing_preload_lists_are_reported():
    with dask.config.set(distributed={}):
        assert config.preloads() == dict.fromkeys(ROLES, False)
