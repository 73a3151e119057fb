"""CuPy's kernels request the planned memory and compute the same, and plans are right.

All on a GPU of NVIDIA's. Each test runs in a new process, because CuPy must be intercepted before
it calls the driver.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.gpu.requirements import needs_nvidia

pytestmark = needs_nvidia

HEAD = """
    from dask_gpurt.devices.occupancy.launches import cupy_launches
    launches = cupy_launches()
    import cupy
    import numpy as np
    from benchmarks.gpu.kernels import kernel
    from dask_gpurt.devices.occupancy.architectures import architecture_of
    from dask_gpurt.devices.occupancy.resident_blocks import Launch, occupancy
    from dask_gpurt.devices.occupancy.planner import LaunchPlan
    from dask_gpurt.devices.occupancy.shaping import LaunchHook, Planner, shaped

    launches.hook = hook = LaunchHook(launches, enabled=True)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    architecture = architecture_of((properties["major"], properties["minor"]))
    assert architecture is not None, "not in the table"

    def planned(leave):
        return shaped(Planner(architecture, leave), lambda: True, hook)

    def carried():
        kernel("shared_nbytes")((4,), (256,), (out,))
        return int(out[0])

    out = cupy.zeros(1, cupy.uint32)
"""


def run(source):
    program = textwrap.dedent(HEAD) + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_raw_kernel_requests_the_planned_memory():
    run("""
        assert carried() == 0
        with planned(2):
            shaped_nbytes = carried()
        (decided,) = [one for one in hook.decisions() if isinstance(one.why, LaunchPlan)][:1]
        assert shaped_nbytes == decided.nbytes > 48 << 10
        assert carried() == 0
    """)


def test_elementwise_and_reduction_kernels_compute_the_same():
    run("""
        rng = np.random.default_rng(3)
        a, b = (cupy.asarray(rng.random(1 << 20)) for _ in range(2))
        twice = cupy.ElementwiseKernel("float64 x", "float64 y", "y = 2 * x", "twice")

        def results():
            return [a + b, cupy.sqrt(a), twice(a), (a * b).sum(), a.max(), cupy.sort(b)]

        plain = results()
        before = len(hook.decisions())
        with planned("fewest"):
            again = results()
        for one, other in zip(plain, again, strict=True):
            assert bool((one == other).all())
        plans = [one for one in hook.decisions() if isinstance(one.why, LaunchPlan)]
        assert len(plans) >= 4, hook.decisions()
        assert hook.failure is None
    """)


def test_a_captured_graph_keeps_launches_unchanged():
    run("""
        stream = cupy.cuda.Stream(non_blocking=True)
        carried()
        out.fill(1)
        cupy.cuda.Stream.null.synchronize()
        with stream:
            stream.begin_capture()
            with planned(2):
                kernel("shared_nbytes")((4,), (256,), (out,))
            graph = stream.end_capture()
            graph.launch()
            stream.synchronize()
        assert int(out[0]) == 0
    """)


def test_resident_blocks_equal_the_drivers_count():
    run("""
        from cupy_backends.cuda.api import driver
        rng = np.random.default_rng(5)
        one = kernel("compute")
        registers = one.num_regs
        one.max_dynamic_shared_size_bytes = architecture.shared_per_block_opt_in_nbytes
        one.preferred_shared_memory_carveout = 100
        wrong = []
        for _ in range(50):
            threads = int(rng.integers(1, 9)) * 32
            nbytes = int(rng.integers(0, architecture.shared_per_block_opt_in_nbytes))
            theirs = driver.occupancyMaxActiveBlocksPerMultiprocessor(
                one.kernel.ptr, threads, nbytes
            )
            ours = occupancy(architecture, Launch(threads, registers, 0, nbytes)).blocks
            if theirs != ours:
                wrong.append((threads, nbytes, theirs, ours))
        assert wrong == [], wrong
    """)
