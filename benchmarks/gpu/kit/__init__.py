"""The kit, which brings the GPU tests and benchmarks to an offline machine.

The machine has Linux on x86-64, Python 3.12, CUDA 13 and the packages of `packages.MACHINE`. Its
repository is a copy of this one, and files that git ignores stay there between two calls.
"""
