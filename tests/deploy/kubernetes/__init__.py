"""A small Kubernetes for tests, and tests of our manifests under the real operator.

It serves as much of the Kubernetes API as kubectl, kopf, kr8s and so the operator of
dask-kubernetes ask for. A pod's container is a process of this machine with the namespaces,
control group, user and system call filter that a container has. Its image is this environment.

| Module | What it does |
|---|---|
| `node.py` | the program that runs all below and the operator, in namespaces of its own |
| `api.py` | the API over HTTP: discovery, requests, watches |
| `objects.py` | all objects and the events of their changes |
| `schemas.py`, `patching.py` | what a definition lets through; patches and selectors. Pure. |
| `kubelet.py` | makes pods for deployments, and runs them |
| `sandbox.py`, `seccomp.py` | one pod: its network, volumes, limits, and its first process |
| `lab.py` | the tests' side: starts a node, calls kubectl, connects clients |
| `shuffles.py` | a shuffle whose answer is known |

It is no Kubernetes: it has no users, no TLS, no images, no admission, and one node.
"""
