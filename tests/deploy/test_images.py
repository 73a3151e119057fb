"""Dockerfiles name the versions that the package is tested with, and copy what its wheel needs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dask_gpurt
from tests.deploy.manifests import KUBERNETES, OVERLAYS, ROOT, documents

DOCKERFILES = sorted(KUBERNETES.glob("Dockerfile*"))


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_oldest_dask(path: Path) -> None:
    (oldest,) = re.findall(r"^OLDEST := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = path.read_text()
    assert re.findall(r"^ARG DASK=(\S+)$", text, re.MULTILINE) == [oldest]
    for name in ("dask", "distributed"):
        assert re.search(rf'"{name}(\[\w+\])?==\$DASK"', text)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_a_python_that_is_supported(
    path: Path, setup: configparser.ConfigParser
) -> None:
    versions = re.findall(r"^FROM \S*?(?:python:|-py)(3\.\d+)", path.read_text(), re.MULTILINE)
    assert len(versions) == path.read_text().count("\nFROM ")
    for version in versions:
        assert f"Python :: {version}\n" in setup["metadata"]["classifiers"] + "\n"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_a_numbered_user(path: Path) -> None:
    users = re.findall(r"^USER (\S+)$", path.read_text(), re.MULTILINE)
    assert users
    assert int(users[-1].split(":")[0]) > 0


def test_the_rapids_image_has_the_versions_of_the_extras(
    setup: configparser.ConfigParser,
) -> None:
    extras = setup["options.extras_require"]
    wanted = {
        one.name: one
        for name in ("cuda13", "ucx")
        for one in map(Requirement, extras[name].split("\n")[1:])
    }
    text = (KUBERNETES / "Dockerfile.rapids").read_text()
    ((rapids, cuda),) = re.findall(r"^FROM rapidsai/base:([\d.]+)-cuda(\d+)-", text, re.MULTILINE)
    assert str(wanted[f"cudf-cu{cuda}"].specifier) == f">={rapids}"
    (found,) = re.findall(r"^RUN for name in (.+); do", text, re.MULTILINE)
    there = {*found.split()}
    for name, requirement in wanted.items():
        plain = re.sub(r"-cu(da)?13x?$", "", name)
        if plain not in there:
            (named,) = re.findall(rf'"?({name}[<>=,.\d]*)"?', text)
            assert Requirement(named).specifier == requirement.specifier


def test_images_are_built_from_what_the_wheel_needs(setup: configparser.ConfigParser) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    readme = setup["metadata"]["long_description"].removeprefix("file: ")
    license_file = setup["metadata"]["license_files"]
    assert "*" in lines
    assert kept == {"dask_gpurt", "setup.cfg", "pyproject.toml", readme, license_file}


def test_overlays_name_the_image_of_this_version() -> None:
    tags = [
        image["newTag"]
        for overlay in OVERLAYS
        for document in documents(KUBERNETES / "overlays" / overlay / "kustomization.yaml")
        for image in document.get("images", ())
    ]
    assert len(tags) == 2
    assert set(tags) == {dask_gpurt.__version__}
