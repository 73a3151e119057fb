"""Rechunks of arrays equal those of plain Dask."""

from __future__ import annotations

from math import prod

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dask_gpurt
from tests.frames.chunks.test_arrays import DTYPES, PICKLED, values
from tests.frames.chunks.test_rechunking import rechunkings
from tests.integration.comparing import runs


@pytest.fixture(autouse=True)
def chunks_are_not_merged():
    """Keep Dask from merging all small input chunks into one before the rechunk."""
    with dask.config.set({"array.chunk-size": "1B"}):
        yield


def blocks(client, lazy):
    """Return every chunk of an array in order, as its task returned it."""
    with client.as_current():
        return client.gather(client.compute(list(lazy.to_delayed().flat)))


def assert_same_blocks(got, expected):
    assert len(got) == len(expected)
    for one, want in zip(got, expected, strict=True):
        assert type(one) is type(want)
        assert one.dtype == want.dtype
        assert one.shape == want.shape
        assert one.flags.c_contiguous == want.flags.c_contiguous
        assert one.flags.f_contiguous == want.flags.f_contiguous
        assert one.flags.writeable == want.flags.writeable
        np.testing.assert_array_equal(np.asarray(one), np.asarray(want))


def assert_same_as_stock(sides, lazy, n_rechunks=None):
    expected = blocks(sides.stock, lazy)
    before = runs(sides.enabled)
    got = blocks(sides.enabled, lazy)
    after = runs(sides.enabled)
    assert after["stock"] == before["stock"]
    ours = after["gpurt"] - before["gpurt"]
    assert ours == n_rechunks if n_rechunks is not None else ours > 0
    assert_same_blocks(got, expected)
    return got


def array(shape, chunks, dtype="f8"):
    return da.from_array(values(dtype, shape), chunks=chunks)


def p2p(lazy, chunks, **options):
    return lazy.rechunk(chunks, method="p2p", **options)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("shape", "old", "new", "n_rechunks"),
    [
        ((60,), 5, 60, 0),
        ((60,), 60, 7, 1),
        ((60, 40), (10, 40), (60, 7), 1),
        ((60, 40), (60, 7), (11, 40), 1),
        ((60, 40), (13, 17), (17, 13), 0),
        ((30, 12, 8), (5, 12, 8), (30, 4, 4), 1),
        ((30, 12, 8), (30, 4, 4), (7, 12, 8), 1),
        ((6, 5, 4, 3), (1, 5, 4, 3), (6, 2, 2, 2), 1),
        ((4, 4), 1, 4, 0),
        ((12, 12), 1, (12, 3), 0),
        ((40, 40), (40, 40), (1, 40), 1),
    ],
    ids=str,
)
def test_array_shapes_are_rechunked_as_in_dask(sides, shape, old, new, n_rechunks):
    """Dask concatenates inputs that belong to only one output, without a rechunk run."""
    lazy = p2p(array(shape, old), new)
    if not n_rechunks:
        before = runs(sides.enabled)
        assert_same_blocks(blocks(sides.enabled, lazy), blocks(sides.stock, lazy))
        assert runs(sides.enabled) == before
    else:
        assert_same_as_stock(sides, lazy, n_rechunks)


#: A type whose byte order stock Dask loses: see `test_byte_order_is_kept`.
SWAPPED = ">f4"


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != SWAPPED] + PICKLED, ids=str)
def test_array_dtypes_are_rechunked_as_in_dask(each_way, dtype):
    assert_same_as_stock(each_way, p2p(array((12, 10), (3, 10), dtype), (12, 4)), 1)


def test_byte_order_is_kept(sides):
    """Dask's result has the byte order of the machine instead of the announced one."""
    lazy = p2p(array((12, 10), (3, 10), SWAPPED), (12, 4))
    got, expected = blocks(sides.enabled, lazy), blocks(sides.stock, lazy)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == lazy.dtype == SWAPPED
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "made",
    [
        np.asfortranarray,
        lambda chunk: np.ma.masked_greater(chunk, 0.5),
        lambda chunk: np.broadcast_to(chunk[:1], chunk.shape),
        lambda chunk: chunk.view(Labelled),
        lambda chunk: chunk.astype("f4") if chunk[0, 0] else chunk,
        lambda chunk: chunk.astype(object),
    ],
    ids=["fortran", "masked", "broadcast", "subclass", "other type", "object"],
)
def test_chunk_types_are_rechunked_as_in_dask(each_way, made):
    lazy = array((12, 10), (3, 10)).map_blocks(made, dtype="f8", meta=np.empty((0, 0)))
    assert_same_as_stock(each_way, p2p(lazy, (12, 4)), 1)


class Labelled(np.ndarray):
    pass


def test_masked_arrays_are_rechunked_as_in_dask(sides):
    source = np.ma.masked_greater(np.arange(120.0).reshape(12, 10), 70)
    (got, *_) = assert_same_as_stock(sides, p2p(da.from_array(source, (3, 10)), (12, 4)), 1)
    np.testing.assert_array_equal(got.mask, source.mask[:, :4])


def test_transposed_array_is_rechunked_as_in_dask(sides):
    assert_same_as_stock(sides, p2p(array((60, 40), (60, 5)).T, (40, 8)), 1)


def test_unknown_chunk_lengths_are_rechunked_as_in_dask(sides):
    lazy = array((30, 12), (10, 12))
    kept = lazy[lazy[:, 0] > 0]
    assert np.isnan(kept.shape[0])
    assert_same_as_stock(sides, p2p(kept, {1: 5}), 3)


def test_empty_chunks_are_rechunked_as_in_dask(sides):
    lazy = array((10, 8), ((3, 0, 3, 4), (8,)))
    assert_same_as_stock(sides, p2p(lazy, ((10,), (0, 5, 3, 0))), 1)


def test_output_chunks_are_spread_over_workers(sides):
    """Outputs of three axes are spread over the workers as evenly as possible."""

    def where(dask_scheduler):
        return [len(w.has_what) for w in dask_scheduler.workers.values()]

    client = sides.enabled
    with client.as_current():
        result = client.persist(p2p(array((9, 9, 9), (1, 9, 9)), (9, 3, 3)))
        client.gather(client.futures_of(result))
        assert client.run_on_scheduler(where) == [3, 3, 3]


def test_balanced_rechunk_equals_dask(sides):
    assert_same_as_stock(sides, p2p(array((47, 20), (10, 20)), (47, 6), balance=True), None)


def test_rechunk_method_comes_from_the_configuration(sides):
    with dask.config.set({"array.rechunk.method": "p2p"}):
        assert_same_as_stock(sides, array((20, 20), (5, 20)).rechunk((20, 5)), 1)


def test_rechunk_follows_a_merge_of_small_chunks(sides):
    with dask.config.set({"array.chunk-size": "1 KiB"}):
        assert_same_as_stock(sides, p2p(array((40, 20), (1, 20)), (40, 2)), 1)


@pytest.mark.parametrize("keep", [np.s_[:, :9], np.s_[:, 11], np.s_[3, ::9]], ids=str)
def test_rechunk_computes_only_requested_outputs(sides, keep):
    lazy = p2p(array((20, 40), (5, 40)), (20, 3))[keep]
    expected = blocks(sides.stock, lazy)
    assert_same_blocks(blocks(sides.enabled, lazy), expected)


def test_large_chunks_over_ucx_equal_dask(over_ucx):
    assert_same_as_stock(over_ucx, p2p(array((1200, 1200), (400, 1200)), (1200, 400)), 1)


def test_rechunk_there_and_back_restores_the_array(sides):
    lazy = array((24, 24), (4, 24))
    back = p2p(p2p(lazy, (24, 4)), (4, 24))
    got = assert_same_as_stock(sides, back, 2)
    assert_same_blocks(got, blocks(sides.stock, lazy))


def test_several_runs_work_at_once(sides):
    lazy = [p2p(array((12, 12), (n, 12), "i4"), (12, n)) for n in (1, 2, 3, 4)]

    def together(client):
        with client.as_current():
            return client.gather(
                client.compute([list(flatten(x.to_delayed().tolist())) for x in lazy])
            )

    for got, expected in zip(together(sides.enabled), together(sides.stock), strict=True):
        assert_same_blocks(got, expected)


def test_rechunk_runs_beside_shuffles_and_reductions(sides):
    with sides.enabled.as_current():
        x = array((40, 40), (10, 40))
        y = p2p(x, (40, 10))
        total = (y + y.T.rechunk((40, 10), method="p2p")).sum().compute()
    assert total == pytest.approx(2 * values("f8", (40, 40)).sum())


def test_outputs_start_on_their_owner(sides):
    """No output task asks the scheduler to move it to another worker."""

    def count_moves(dask_scheduler):
        stock = dask_scheduler.handlers["shuffle_restrict_task"]

        def counted(**kwargs):
            dask_scheduler.extensions["moves"].append(kwargs["key"])
            return stock(**kwargs)

        dask_scheduler.extensions["moves"] = []
        dask_scheduler.extensions["stock restrict"] = stock
        dask_scheduler.handlers["shuffle_restrict_task"] = counted

    def moves(dask_scheduler):
        stock = dask_scheduler.extensions.pop("stock restrict")
        dask_scheduler.handlers["shuffle_restrict_task"] = stock
        return len(dask_scheduler.extensions.pop("moves"))

    sides.enabled.run_on_scheduler(count_moves)
    try:
        blocks(sides.enabled, p2p(array((20, 40), (5, 40)), (20, 3)) + 1)
    finally:
        n_moves = sides.enabled.run_on_scheduler(moves)
    assert n_moves == 0


def test_wrong_chunks_fail_as_in_dask(sides):
    """A chunk has one axis less than announced."""
    lazy = array((12, 10), (3, 10)).map_blocks(lambda chunk: chunk[0], dtype="f8")
    for client in (sides.stock, sides.enabled):
        with pytest.raises(RuntimeError, match="failed during transfer phase") as caught:
            blocks(client, p2p(lazy, (12, 4)))
        assert isinstance(caught.value.__cause__, IndexError)


def assert_any_rechunk_equals_stock(sides, n_examples):
    @settings(
        max_examples=n_examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(plan=rechunkings(), dtype=st.sampled_from(["f8", "i2", "U3", "O", "M8[s]"]))
    def check(plan, dtype):
        old, new = plan
        lazy = p2p(array([sum(axis) for axis in old], old, dtype), new)
        assert_same_blocks(blocks(sides.enabled, lazy), blocks(sides.stock, lazy))

    check()


def test_rechunk_equals_dask(sides):
    assert_any_rechunk_equals_stock(sides, 25)


def test_rechunk_over_ucx_equals_dask(over_ucx):
    assert_any_rechunk_equals_stock(over_ucx, 8)


def test_rechunk_spills_and_stays_correct(sides):
    client = sides.enabled
    lazy = p2p(array((400, 400), (50, 400)), (400, 30))
    expected = blocks(sides.stock, lazy)
    before = dask_gpurt.status(client)["totals"]["spilled_nbytes"]
    with dask.config.set({"gpurt.shuffle.memory": "64 KiB"}):
        dask_gpurt.enable(client)
    try:
        assert_same_blocks(blocks(client, lazy), expected)
    finally:
        dask_gpurt.enable(client)
    spilled = dask_gpurt.status(client)["totals"]["spilled_nbytes"] - before
    assert prod((400, 400)) * 8 // 2 < spilled <= prod((400, 400)) * 8
