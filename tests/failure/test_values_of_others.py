"""Values with serializers of their own are spilled and restored as in plain Dask."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client, wait
from distributed.protocol import dask_deserialize, dask_serialize, register_generic

from dask_gpurt.plugins.patches.values import value_bytes
from tests.failure.gates import DEADLINE_S, until
from tests.failure.memory_stage import (
    MIB,
    assert_no_values_left,
    make_block,
    open_small,
    stores,
    sum_of,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with open_small(tmp_path_factory.mktemp("others"), n_workers=1) as client:
        yield client


@pytest.fixture
def client(cluster: Client) -> Iterator[Client]:
    yield cluster
    assert_no_values_left(cluster)


class Sized:
    """A value that holds a block."""

    def __init__(self, number: int, nbytes: int = 2 * MIB) -> None:
        self.number = number
        self.block = make_block(number, nbytes)

    def __sizeof__(self) -> int:
        return self.block.nbytes

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and np.array_equal(self.block, other.block)  # type: ignore[attr-defined]


class Locked(Sized):
    """A value that pickle refuses."""

    def __init__(self, number: int, nbytes: int = 2 * MIB) -> None:
        super().__init__(number, nbytes)
        self.lock = threading.Lock()


class LockedMore(Locked):
    """A value with the serializer of its base class."""


class Generic(Sized):
    """A class that Dask serializes by its attributes."""

    def __reduce__(self) -> Any:
        raise TypeError("not by pickle")


class NotSo(Sized):
    """A value whose serializer leaves it to pickle."""


class Failing(Sized):
    """A value whose serializer fails, although pickle would not."""


class WithState(Sized):
    """A value that gives its state to pickle."""

    def __getstate__(self) -> Any:
        return {"number": self.number}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["number"])  # type: ignore[misc]


class Unpicklable(Sized):
    def __reduce__(self) -> Any:
        raise RuntimeError("nobody takes this apart")


@dask_serialize.register(Locked)
def _serialize(value: Locked) -> Any:
    # Views cannot be pickled, so pickling this result cannot hide an error of the store.
    header = {"type": type(value).__name__, "number": value.number}
    return header, [memoryview(value.block.view(np.uint8))]


@dask_deserialize.register(Locked)
def _deserialize(header: Any, frames: Any) -> Locked:
    made = globals()[header["type"]](header["number"], 0)
    made.block = np.frombuffer(frames[0], np.int64)
    return made


register_generic(Generic)


@dask_serialize.register(NotSo)
def _not_so(value: NotSo) -> Any:
    raise NotImplementedError


@dask_serialize.register(Failing)
def _fail(value: Failing) -> Any:
    raise RuntimeError("the serializer is broken")


def is_right(value: Any, number: int) -> bool:
    while not isinstance(value, Sized):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return np.array_equal(value.block, make_block(number))


def contained(kind: type, number: int, container: str) -> Any:
    made = kind(number)
    return {
        "none": made,
        "list": [made, kind(number)],
        "tuple": (made,),
        "dict": {"a": made},
        "nested": [{"a": (made,)}],
    }[container]


@pytest.mark.parametrize(
    ("kind", "container"),
    [(Locked, c) for c in ("none", "list", "tuple", "dict", "nested")]
    + [(kind, "none") for kind in (LockedMore, Generic, NotSo, WithState)],
)
def test_value_with_a_registered_serializer_is_spilled(
    client: Client, kind: type, container: str
) -> None:
    (store,) = stores(client)
    made = client.map(contained, [kind] * 16, range(16), container=container, pure=False)
    wait(made, timeout=DEADLINE_S)
    memory = store.residency.levels[0]
    until(lambda: memory.used_nbytes <= memory.capacity_nbytes, "values stay in memory")
    until(lambda: store.has_spilled, "values stay in memory")
    rights = client.map(is_right, made, range(16), pure=False)
    assert all(client.gather(rights))


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Unpicklable, "nobody takes this apart"), (Failing, "the serializer is broken")],
)
def test_unserializable_value_stays_in_memory_and_is_logged_once(
    client: Client, caplog: pytest.LogCaptureFixture, kind: type, why: str
) -> None:
    (store,) = stores(client)
    with caplog.at_level(logging.WARNING, "dask_gpurt.memory"):
        made = client.map(kind, range(14), pure=False)
        wait(made, timeout=DEADLINE_S)
        blocks = client.map(make_block, range(20), pure=False)
        # Other values are spilled instead, and tasks go on.
        assert client.gather(client.map(sum_of, blocks, pure=False))
    assert not any(store.is_spilled(one.key) for one in made)
    said = [one.getMessage() for one in caplog.records if "it stays in memory" in one.getMessage()]
    assert len(said) == 1
    assert why in said[0]
    assert kind.__name__ in said[0]
    # The text does not contain the value.
    assert max(map(len, said)) < 500
    assert all(client.gather(client.map(is_there, made, pure=False)))


def is_there(value: Any) -> bool:
    return isinstance(value, Sized)


class OwnError(Exception):
    """An error class of a user's program."""


ERRORS: dict[str, BaseException] = {
    "own": OwnError("not this one"),
    "key": KeyError("k"),
    "value": ValueError("not this one"),
    "connection": ConnectionError("no such database"),
    "memory": MemoryError("not enough in there"),
    "os": FileNotFoundError(2, "gone"),
    "descriptors": OSError(24, "too many"),
}


class Sour(Sized):
    """A value that can be serialized but not deserialized."""

    def __init__(self, kind: str) -> None:
        super().__init__(1)
        self.kind = kind

    def __reduce__(self) -> Any:
        return _raise, (self.kind,)


def _raise(kind: str) -> None:
    raise ERRORS[kind]


def use(value: Any) -> int:
    return int(value.number)


@pytest.mark.parametrize("kind", ERRORS)
def test_unpickling_error_is_raised_with_the_key(client: Client, kind: str) -> None:
    (store,) = stores(client)
    # Reads wait during a shortage as long as other work may end it.
    sour = client.submit(Sour, kind, pure=False)
    wait(sour, timeout=DEADLINE_S)
    blocks = client.map(make_block, range(16), pure=False)
    wait(blocks, timeout=DEADLINE_S)
    until(lambda: store.is_spilled(sour.key), "it stays in memory")
    used = client.submit(use, sour, pure=False)
    error = used.exception(DEADLINE_S)
    assert type(error) is type(ERRORS[kind])
    assert str(error) == str(ERRORS[kind])
    assert any(sour.key in note for note in error.__notes__)
    assert len(error.__notes__) == 1
    # The value was not computed again, and no read waits for it.
    assert store.is_spilled(sour.key)
    assert not store.failed_reads(0.0)
    assert client.gather(client.map(sum_of, blocks[:4], pure=False))
    ERRORS[kind].__notes__ = []  # type: ignore[attr-defined]
    ERRORS[kind].__traceback__ = None


def test_self_referencing_container_is_pickled() -> None:
    outer: list[Any] = []
    inner = [outer]
    outer.append(inner)
    assert value_bytes.take_apart([outer]) is None


@pytest.mark.parametrize("value", [[b"a"], np.ma.masked_array([1, 2], [0, 1]), "a", [], {}])
def test_values_with_a_layout_or_for_pickle_use_no_serializer(value: Any) -> None:
    assert value_bytes.take_apart(value) is None


def test_empty_frame_is_read_back() -> None:
    empty = Locked(3, 0)
    header, frames = value_bytes.take_apart(empty)  # type: ignore[misc]
    assert value_bytes.rebuild(header, frames) == empty
