"""The suite that every tier must pass. Subclass it and implement `make_tier`.

The values here are compressible enough for any tier that compresses. A tier that may refuse values
for other reasons than room sets `is_choosy`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import DamagedValueError, TierFullError
from dask_gpurt.frames.flat.values import Flat

PATIENCE_S = 60.0
deterministic = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

#: Lengths of a value's buffers.
VALUES: dict[str, tuple[int, ...]] = {
    "no buffers": (),
    "nothing in its buffer": (0,),
    "one byte": (1,),
    "small": (5_000,),
    "small ones and empty ones": (0, 100, 0, 0, 3_000, 7, 0),
    "a block": (4096,),
    "just under 64 KiB": ((64 << 10) - 1,),
    "64 KiB": (64 << 10,),
    "just over 64 KiB": ((64 << 10) + 1,),
    "large": (3 << 20,),
    "large, odd length": ((9 << 20) + 4097,),
    "large between small": (10, 1 << 20, 20, (1 << 20) + 1, 0, 30),
    "many small": tuple(range(0, 4_000, 3)),
    "many, almost large": (60_000,) * 30,
    "many large": tuple((64 << 10) + n for n in range(40)),
}


def half_noise(nbytes: int, seed: int) -> np.ndarray:
    """Return bytes that differ everywhere, but still compress."""
    rng = np.random.default_rng([nbytes, seed])
    data = np.zeros(nbytes, np.uint8)
    data[::4] = rng.integers(0, 256, len(data[::4]), dtype=np.uint8)
    return data


def flat_of(lengths: tuple[int, ...], seed: int = 0) -> Flat:
    buffers = tuple(half_noise(n, seed + number) for number, n in enumerate(lengths))
    return Flat(b"header %d" % seed, buffers)


def copied(flat: Flat) -> Flat:
    return Flat(flat.header, tuple(buffer.copy() for buffer in flat.buffers))


def assert_same(got: Flat, expected: Flat) -> None:
    assert type(got.header) is bytes
    assert got.header == expected.header
    assert len(got.buffers) == len(expected.buffers)
    for mine, theirs in zip(got.buffers, expected.buffers, strict=True):
        assert mine.dtype == np.uint8
        assert mine.ndim == 1
        assert mine.flags.c_contiguous
        np.testing.assert_array_equal(mine, theirs)


def in_threads(*functions: Any) -> None:
    """Run functions at the same time; raise the error of one of them."""
    errors: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def run(function: Any) -> None:
        try:
            together.wait(PATIENCE_S)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "stuck"
    if errors:
        raise errors[0]


class TierSuite:
    """Implement `make_tier` in a subclass."""

    #: The tier may refuse a value for which it has room.
    is_choosy = False

    def make_tier(self, capacity_nbytes: int | None = None) -> Any:
        """Return an empty tier. Without a capacity, it has room for at least 256 MiB."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self):
        tier = self.make_tier()
        yield tier
        tier.close()

    def put(self, tier: Any, flat: Flat) -> Any:
        try:
            return tier.put(flat)
        except TierFullError:
            if not self.is_choosy:
                raise
            assert tier.used_nbytes == 0
            pytest.skip("this tier does not want this value")

    def test_it_has_a_name_and_nothing_in_it(self, tier):
        assert isinstance(tier.name, str)
        assert tier.used_nbytes == 0

    @pytest.mark.parametrize("name", VALUES)
    def test_values_come_back(self, tier, name):
        value = flat_of(VALUES[name])
        place = self.put(tier, value)
        assert_same(tier.get(place), value)
        assert_same(tier.get(place), value)

    def test_the_size_of_a_value_counts_until_it_is_dropped(self, tier):
        places = [tier.put(flat_of((200_000, 10_000 * n), n)) for n in range(4)]
        total = 0
        assert all(place.nbytes > 0 for place in places)
        assert tier.used_nbytes == sum(place.nbytes for place in places)
        for place in places:
            tier.get(place)
        assert tier.used_nbytes == sum(place.nbytes for place in places)
        for number in (2, 0, 3, 1):
            total += places[number].nbytes
            tier.drop(places[number])
            assert tier.used_nbytes == sum(place.nbytes for place in places) - total

    def test_dropping_again_is_nothing(self, tier):
        first, second = (tier.put(flat_of((100_000,), n)) for n in range(2))
        tier.drop(first)
        tier.drop(first)
        assert tier.used_nbytes == second.nbytes
        assert_same(tier.get(second), flat_of((100_000,), 1))
        with pytest.raises((KeyError, DamagedValueError)):
            tier.get(first)

    def test_a_value_comes_back_in_memory_of_its_own(self, tier):
        value = flat_of((300_000, 5_000))
        expected = copied(value)
        place = tier.put(value)
        for buffer in value.buffers:
            buffer[:] = 7
        one = tier.get(place)
        assert_same(one, expected)
        for buffer in one.buffers:
            buffer[:] = 9
        assert_same(tier.get(place), expected)

    def test_memory_of_any_kind_is_taken(self, tier):
        whole = half_noise(2 << 20, 0)
        askew = whole[3 : 3 + (1 << 20)]
        fixed = half_noise(100_000, 1)
        fixed.flags.writeable = False
        foreign = np.frombuffer(bytes(half_noise(100_000, 2)), np.uint8)
        value = Flat(b"", (askew, fixed, foreign, fixed[5:]))
        assert_same(tier.get(tier.put(value)), value)

    def test_restored_values_are_aligned(self, tier):
        got = tier.get(tier.put(flat_of((1 << 20, 100_000, 200, 300))))
        for buffer in got.buffers:
            assert buffer.__array_interface__["data"][0] % 8 == 0

    def test_a_full_tier_refuses_and_has_room_again(self):
        tier = self.make_tier(1 << 20)
        assert tier.capacity_nbytes is not None
        places = []
        with pytest.raises(TierFullError):
            for number in range(1000):
                places.append(tier.put(flat_of((100_000,), number)))
        used_nbytes = tier.used_nbytes
        assert places
        assert used_nbytes == sum(place.nbytes for place in places) <= tier.capacity_nbytes
        for number, place in enumerate(places):
            assert_same(tier.get(place), flat_of((100_000,), number))
        tier.drop(places[0])
        again = tier.put(flat_of((100_000,), 0))
        assert_same(tier.get(again), flat_of((100_000,), 0))
        with pytest.raises(TierFullError):
            tier.put(flat_of((64 << 20,)))
        assert tier.used_nbytes == used_nbytes - places[0].nbytes + again.nbytes
        tier.close()

    def test_closing_lets_go_of_everything(self):
        tier = self.make_tier()
        places = [tier.put(flat_of((100_000,), n)) for n in range(3)]
        tier.drop(places[1])
        tier.close()
        tier.close()
        assert tier.used_nbytes == 0
        for place in places:
            tier.drop(place)
        with pytest.raises((TierFullError, OSError)):
            tier.put(flat_of((100_000,)))
        assert tier.used_nbytes == 0

    def test_random_operations_against_a_dict(self):
        operations = st.lists(
            st.tuples(
                st.sampled_from(["put", "put", "get", "drop"]),
                st.integers(0, 5),
                st.sampled_from([(4_000,), (70_000,), (70_000, 4_000), (300_000,)]),
            ),
            max_size=30,
        )

        @deterministic
        @given(operations)
        def check(steps):
            tier = self.make_tier(1 << 20)
            model: dict[int, tuple[Any, Flat]] = {}
            try:
                for seed, (what, key, lengths) in enumerate(steps):
                    if what == "put" and key not in model:
                        value = flat_of(lengths, seed)
                        try:
                            model[key] = (tier.put(value), value)
                        except TierFullError:
                            pass
                    elif what == "get" and key in model:
                        place, value = model[key]
                        assert_same(tier.get(place), value)
                    elif what == "drop" and key in model:
                        tier.drop(model.pop(key)[0])
                    used_nbytes = sum(place.nbytes for place, _ in model.values())
                    assert tier.used_nbytes == used_nbytes <= tier.capacity_nbytes
                for place, value in model.values():
                    assert_same(tier.get(place), value)
            finally:
                tier.close()
            assert tier.used_nbytes == 0

        check()

    def test_threads_at_once(self, tier):
        def work(thread: int):
            def run():
                for step in range(12):
                    seed = 100 * thread + step
                    value = flat_of((90_000 + seed, 1_000), seed)
                    place = tier.put(value)
                    assert_same(tier.get(place), value)
                    tier.drop(place)

            return run

        in_threads(*map(work, range(4)))
        assert tier.used_nbytes == 0

    def test_many_threads_read_one_value(self, tier):
        value = flat_of((500_000, 70_000, 10))
        place = tier.put(value)

        def read():
            for _ in range(5):
                assert_same(tier.get(place), value)

        in_threads(*[read] * 4)

    def test_a_value_dropped_during_a_read_is_complete_or_missing(self, tier):
        for seed in range(20):
            value = flat_of((400_000, 100), seed)
            place = tier.put(value)

            def read(place=place, value=value):
                try:
                    got = tier.get(place)
                except (KeyError, DamagedValueError):
                    return
                assert_same(got, value)

            in_threads(read, lambda place=place: tier.drop(place))
            assert tier.used_nbytes == 0
