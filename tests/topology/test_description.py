"""Descriptions of machines are read and written; errors name the wrong line."""

from __future__ import annotations

import re
import textwrap
from fnmatch import fnmatchcase

import pytest
import yaml

from dask_gpurt.errors import ConfigError
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.topology import description, yaml_tree
from tests.topology.test_model import DATA


@pytest.mark.parametrize("path", sorted(DATA.glob("*.yaml")), ids=lambda path: path.stem)
def test_written_description_is_read_back_equal(path):
    topology = description.parse(path.read_text(), path.name)
    again = description.parse(description.dump(topology))
    assert set(again.links) == set(topology.links)
    assert (again.hosts, again.switches) == (topology.hosts, topology.switches)


@pytest.mark.parametrize(
    ("text", "nbytes_per_s"),
    [
        ("450 GB/s", 450e9),
        ("100 Gb/s", 12.5e9),
        ("100Gbit/s", 12.5e9),
        ("1 GiB/s", 2**30),
        ("2.5e2 MB/s", 250e6),
        ("7 B/s", 7),
    ],
)
def test_rates_may_be_in_bytes_or_bits(text, nbytes_per_s):
    made = description.parse(
        f"""
        hosts: [{{name: h, numa: [{{name: a}}, {{name: b}}],
                  links: [{{between: [a, b], bandwidth: {text}}}]}}]
        """
    )
    assert made.links[0].bandwidth_nbytes_per_s == nbytes_per_s


HOST = """\
hosts:
  - name: box
    numa: [{name: numa0}, {name: numa1}]
    links:
      - {between: [numa0, numa1], bandwidth: 20 GB/s}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "line", "says"),
    [
        ("20 GB/s", "20 GBs", 5, "hosts[0].links[0].bandwidth is '20 GBs'; it may be such as"),
        ("20 GB/s", "20", 5, "bandwidth is 20"),
        ("20 GB/s", "0 GB/s", 5, "leave the link out"),
        ("20 GB/s", "1e999 GB/s", 5, "bandwidth is"),
        ("20 GB/s", "-1 GB/s", 5, "bandwidth is"),
        (", bandwidth: 20 GB/s", "", 5, "lacks the key 'bandwidth'"),
        ("[numa0, numa1]", "[numa0, numa7]", 5, "'numa7', which is no node here"),
        ("[numa0, numa1]", "[numa0]", 5, "it may be two nodes"),
        ("bandwidth", "bandwith", 5, "has no key 'bandwith'"),
        ("between", "name: x, between: ['numa*', 'numa*'], x", 5, "has no key 'x'"),
        ("[numa0, numa1]", "['numa*', 'numa*'], name: x", 5, "would name 2 links"),
        ("name: box", "name: a/b", 2, "hosts[0].name is 'a/b'"),
        ("{name: numa1}", "{name: numa0}", 3, "'box/numa0' occurs twice"),
        ("[{name: numa0}, {name: numa1}]", "[]", 3, "at least one NUMA node"),
        ("    links:", "    addresses: here\n    links:", 4, "hosts[0].addresses is 'here'"),
        ("    links:", "    name: other\n    links:", 4, "occurs twice"),
        ("hosts:", "host:", 1, "no key 'host'"),
        (
            "    links:",
            "    devices: [{name: g, kind: tpu}]\n    links:",
            4,
            "hosts[0].devices[0].kind is 'tpu'; it may be gpu",
        ),
        (
            "    links:",
            "    nics: [{name: e, numa: n9}]\n    links:",
            4,
            "numa is 'n9'; it may be numa0 or numa1",
        ),
    ],
)
def test_error_names_its_line(right, wrong, line, says):
    assert HOST.count(right) == 1
    with pytest.raises(ConfigError) as caught:
        description.parse(HOST.replace(right, wrong), "machines.yaml")
    assert says in str(caught.value)
    assert f"line {line}" in str(caught.value)


TWO = """\
hosts:
  - name: a
    addresses: [10.0.0.1, a]
    numa: [{name: n}]
    devices:
      - {name: g0, kind: gpu, workers: [w0, w0, "x*"]}
      - {name: g1, kind: gpu, workers: [1, "tcp://[::1]:1"]}
  - name: b
    addresses: [10.0.0.2]
    numa: [{name: n}]
    devices: [{name: g0, kind: gpu, workers: [w2, "x*", "tcp://[[]::1]:1"]}]
"""


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("name: b", "name: a", "line 8: hosts[1].name names 'a', as hosts[0] does"),
        ("0.0.2", "0.0.1", "line 9: hosts[1].addresses names '10.0.0.1', as hosts[0] does"),
        ("10.0.0.2", "a", "line 9: hosts[1].addresses names 'a', as hosts[0] does"),
        ("[1,", "[w0,", "line 7: hosts[0].devices[1].workers names 'w0', as hosts[0].devices[0]"),
        ("w2", "'1'", "line 11: hosts[1].devices[0].workers names '1', as hosts[0].devices[1]"),
        ("[[]", "[", "workers names 'tcp://[::1]:1', as hosts[0].devices[1] does"),
    ],
)
def test_hosts_and_device_workers_are_distinguished(right, wrong, says):
    description.parse(TWO)
    assert TWO.count(right) == 1
    with pytest.raises(ConfigError, match=re.escape(says)):
        description.parse(TWO.replace(right, wrong))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is None"),
        ("[]", "the file is []"),
        ("hosts: 3", "hosts is 3"),
        ("hosts: [3]", "hosts[0] is 3"),
        ("hosts: [", "is not YAML"),
        ("? [a]\n: 1", "is not YAML"),
        ("hosts: &a [*a]", "is not YAML"),
        ("hosts: !!python/object/apply:os.getcwd []", "is not YAML"),
        ("[" * 50_000, "topology"),
        ("#" * (description.MAX_NCHARS + 1), "has more than"),
    ],
)
def test_empty_description_is_refused(text, says):
    with pytest.raises(ConfigError, match="topology") as caught:
        description.parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2024-02-31", "timestamp"),
        ("2001-12-14t21:59:43.10-99:30", "timestamp"),
        ("!!timestamp x", "timestamp"),
        ("0b_", "int"),
        ("!!int foo", "int"),
        ("!!float foo", "float"),
        ("!!bool foo", "bool"),
        ("!!map foo", "map"),
        ("!!map [a]", "map"),
        pytest.param("1" * 5000, "int", id="digits"),
    ],
)
def test_misleading_value_is_named_with_its_line(value, kind):
    text = HOST.replace("numa0}", f"numa0, memory: {value}}}", 1)
    with pytest.raises(ConfigError, match=r"machines\.yaml") as caught:
        description.parse(text, "machines.yaml")
    assert f"is not a valid {kind}, line" in str(caught.value)
    assert "line 3, column 34" in str(caught.value)


@pytest.mark.parametrize("text", ["- " * 200, "{a: " * 200, "[" * 200 + "]" * 200])
def test_deeply_nested_description_is_refused_before_parsing(text, monkeypatch):
    monkeypatch.setattr(yaml_tree.SectionLoader, "get_single_data", None)
    with pytest.raises(ConfigError, match="line 1: nested too deeply"):
        description.parse(text)


def test_work_grows_with_hosts_and_not_with_pairs(monkeypatch):
    compared = []

    def counting(node, pattern):
        compared.append(node)
        return fnmatchcase(node, pattern)

    monkeypatch.setattr(description, "fnmatchcase", counting)

    def n_compared(hosts):
        compared.clear()
        text = description.dump(gpu_hosts(hosts, 2, nic_bandwidth=1e9, nvlink=True))
        assert len(description.parse(text).hosts) == hosts
        return len(compared)

    assert n_compared(40) == pytest.approx(4 * n_compared(10), rel=0.05)


def test_number_of_links_from_patterns_is_bounded():
    nodes = [{"name": f"n{i}"} for i in range(400)]
    links = [{"between": ["n*", "n*"], "bandwidth": "1 GB/s"}]
    text = yaml.safe_dump({"hosts": [{"name": "h", "numa": nodes, "links": links}]})
    with pytest.raises(ConfigError, match="makes more than"):
        description.parse(text)


def test_the_example_in_the_docstring_is_a_description():
    text = re.search("::\n(.*?)\n\nEnds of links", description.__doc__, re.DOTALL)[1]
    found = description.parse(textwrap.dedent(text), "docstring")
    assert [host.name for host in found.hosts] == ["box"]
    assert {"box/gpu0", "box/mlx0", "fabric"} <= {end for link in found.links for end in link.ends}
