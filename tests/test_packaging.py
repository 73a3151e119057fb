"""Versions and requirements agree in setup.cfg, the Makefile, CI and the code."""

from __future__ import annotations

import configparser
import pathlib
import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import dask_gpurt
from dask_gpurt.plugins.patches.p2p import TESTED

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", ["dask", "distributed"])
def test_requirements_are_the_tested_versions(setup, name):
    wanted = {
        one.name: one for one in map(Requirement, lines(setup["options"]["install_requires"]))
    }
    first, beyond = TESTED
    assert str(wanted[name].specifier) == f"<{beyond},>={first}"


def test_the_makefile_tests_versions_that_are_allowed(setup):
    makefile = (ROOT / "Makefile").read_text()
    ends = re.findall(r"^(?:OLDEST|NEWEST) := (\S+)$", makefile, re.MULTILINE)
    assert len(ends) == 2
    for requirement in map(Requirement, lines(setup["options"]["install_requires"])):
        if requirement.name in ("dask", "distributed"):
            assert all(end in requirement.specifier for end in ends)


def test_the_makefile_tests_the_lowest_versions(setup):
    makefile = (ROOT / "Makefile").read_text()
    (floor,) = re.findall(r"^FLOOR := (.+)$", makefile, re.MULTILINE)
    requirements = map(Requirement, lines(setup["options"]["install_requires"]))
    wanted = {one.name: str(one.specifier).removeprefix(">=") for one in requirements}
    tested = dict(one.split("==") for one in floor.split())
    for name in ("pandas", "numpy", "pyarrow"):
        assert Version(tested[name]) == Version(wanted[name])


def test_ci_runs_the_oldest_and_the_newest_python(setup):
    named = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == [named[0], named[-1]]
    assert setup["options"]["python_requires"] == f">={named[0]}"


def test_the_changelog_begins_with_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert first is not None
    assert first[1] == dask_gpurt.__version__
