"""The packages that the kit carries, by archive, and the packages that it leaves to the machine."""

from __future__ import annotations

#: The archives, and the packages in each, without their dependencies.
PACKAGES: dict[str, tuple[str, ...]] = {
    "tests": (
        "pytest==9.2.0",
        "pytest-timeout==2.4.0",
        "iniconfig==2.3.1",
        "packaging==26.4",
        "pluggy==1.7.0",
        "pygments==2.21.0",
        "hypothesis==6.170.17",
        "sortedcontainers==2.4.0",
        "msgpack==1.2.4",
    ),
    "dask": (
        "dask==2026.7.1",
        "distributed==2026.7.1",
        "click==8.5.1",
        "cloudpickle==3.1.3",
        "fsspec==2026.9.0",
        "jinja2==3.1.6",
        "locket==1.0.0",
        "markupsafe==3.0.4",
        "partd==1.4.2",
        "psutil==7.2.2",
        "pyyaml==6.0.4",
        "tblib==3.2.2",
        "toolz==1.2.0",
        "tornado==6.6.1",
        "zict==3.0.0",
        "nvidia-ml-py==13.615.71",
        "rapids-logger==0.3.0",
        "librmm-cu13==26.10.0",
        "rmm-cu13==26.10.0",
        "libucx-cu13==1.21.0",
        "libucxx-cu13==0.52.0",
        "ucxx-cu13==0.52.0",
        "distributed-ucxx-cu13==0.52.0",
    ),
    "cudf": (
        "libcudf-cu13==26.10.2",
        "pylibcudf-cu13==26.10.2",
        "cudf-cu13==26.10.2",
        "dask-cudf-cu13==26.10.2",
        "cachetools==8.0.2",
        "nvtx==0.2.17",
    ),
    # Libraries that libcudf links.
    "codecs": (
        "libkvikio-cu13==26.10.0",
        "nvidia-libnvcomp-cu13==5.3.0.16",
        "nvidia-nvcomp-cu13==5.3.0.16",
    ),
    # The newest versions that cuDF takes. A machine may have newer ones.
    "older": ("numpy==2.4.6", "pandas==3.0.6"),
}

#: Packages that the machine already has. A rehearsal installs them in their place.
MACHINE = (
    "cupy-cuda13x==14.2.0",
    "cuda-bindings==13.5.0",
    "cuda-core==1.2.2",
    "numba==0.68.1",
    "numba-cuda==0.30.4",
    "numpy==2.5.2",
    "nvidia-cuda-nvrtc==13.5.37",
    "nvidia-cufile==1.20.0.107",
    "nvidia-nvjitlink==13.5.37",
    "pandas==3.1.1",
    "pyarrow==26.0.1",
)

#: The library whose GPU code is pruned: its archive, and its path in there.
PRUNED = ("cudf", "libcudf/lib64/libcudf.so")

#: Files that no test and no benchmark reads.
LEFT_OUT = (
    "*.a",
    "*.la",
    "*.pxd",
    "*.pyi",
    "*.pyx",
    "*/bin/*",
    "*/cmake/*",
    "*/examples/*",
    "*/include/*",
    "*/pkgconfig/*",
    "*/share/*",
    "*/tests/*",
    "*/tests_internal/*",
    "*_perftest*",
    *(f"*.cpython-{version}-*" for version in ("39", "310", "311", "313", "314", "314t")),
)
