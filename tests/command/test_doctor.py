"""`dask gpurt doctor` and `status` report bad settings and addresses."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dask_gpurt.cli import gpurt
from dask_gpurt.command import connect
from dask_gpurt.command.checks import local as findings
from dask_gpurt.command.doctor import examine
from tests.command.conftest import Shell
from tests.command.findings import found
from tests.conftest import Sides
from tests.limits import HANG_S

CLIENT_PRELOAD = "distributed:\n  client:\n    preload: [json]\n"


def test_doctor_finds_nothing_wrong_in_a_good_setup(shell: Shell) -> None:
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 0, outcome.out
    assert outcome.err == ""
    (flag,) = found(outcome, "flag")
    assert flag["level"] == "note"
    assert "not set" in flag["text"]
    assert "DASK_GPURT__ENABLED=true" in flag["remedy"]
    for name in ("python", "dask", "distributed", "pandas", "pyarrow", "numpy"):
        assert found(outcome, name)[0]["level"] == "ok"
    for name in ("cudf", "cupy", "rmm", "ucxx", "nvcomp"):
        assert found(outcome, name)[0]["level"] == "ok"
    assert "tested on one GPU of NVIDIA" in found(outcome, "gpu")[0]["text"]
    assert found(outcome, "huge pages")
    assert found(outcome, "support")[0]["level"] == "ok"
    text = shell.gpurt("doctor").out
    assert text.endswith("no problems\n")
    assert "-> set DASK_GPURT__ENABLED=true" in text


@pytest.mark.parametrize(("value", "level", "state"), [("true", "ok", "on"), ("0", "note", "off")])
def test_flag_from_the_environment_is_shown(
    shell: Shell, value: str, level: str, state: str
) -> None:
    (flag,) = found(shell.gpurt("doctor", "--json", env={"DASK_GPURT__ENABLED": value}), "flag")
    assert flag["level"] == level
    assert flag["text"].startswith(f"{state}, by the environment variable DASK_GPURT__ENABLED")


def test_a_flag_that_is_neither_on_nor_off_is_a_problem(shell: Shell) -> None:
    outcome = shell.gpurt("doctor", "--json", env={"DASK_GPURT__ENABLED": "maybe"})
    (flag,) = found(outcome, "flag")
    assert flag["level"] == "problem"
    assert flag["text"] == (
        "in the environment variable DASK_GPURT__ENABLED,"
        " gpurt.enabled is 'maybe'; it may be true or false"
    )


def test_a_flag_with_one_underscore_is_a_problem(shell: Shell) -> None:
    outcome = shell.gpurt("doctor", "--json", env={"DASK_GPURT_ENABLED": "true"})
    (flag,) = found(outcome, "flag")
    assert flag["level"] == "problem"
    assert flag["remedy"] == "set DASK_GPURT__ENABLED instead"


def test_array_expressions_are_noted(shell: Shell) -> None:
    assert found(shell.gpurt("doctor", "--json"), "arrays") == []
    outcome = shell.gpurt("doctor", "--json", env={"DASK_ARRAY__QUERY_PLANNING": "True"})
    (arrays,) = found(outcome, "arrays")
    assert arrays["level"] == "note" and "stock Dask combines" in arrays["text"]


def test_a_working_directory_that_is_gone_is_reported(shell: Shell) -> None:
    (shell.directory / "gone").mkdir()
    line = f"cd gone && rmdir ../gone && {sys.executable} -m dask_gpurt.cli doctor"
    done = subprocess.run(
        line, shell=True, cwd=shell.directory, env=shell.env, timeout=HANG_S, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    assert b"does not exist any more" in done.stdout


@pytest.mark.parametrize("option", ["trace --seconds", "compare --minutes", "demo --scale"])
def test_an_amount_has_to_be_a_number(shell: Shell, option: str) -> None:
    outcome = shell.gpurt(*option.split(), "nan")
    assert outcome.code == 2
    assert "nan is not a number" in outcome.err


def test_flag_from_a_file_is_shown(shell: Shell, user_yaml: Callable[[str], Path]) -> None:
    path = user_yaml("gpurt:\n  enabled: true\n")
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 0
    (flag,) = found(outcome, "flag")
    assert (flag["level"], flag["text"]) == ("ok", f"on, by {path}")


def test_preload_list_replaced_by_a_file_is_reported(
    shell: Shell, user_yaml: Callable[[str], Path]
) -> None:
    path = user_yaml(CLIENT_PRELOAD)
    outcome = shell.gpurt("doctor", "--json")
    assert outcome.code == 1
    (preload,) = found(outcome, "preload")
    assert preload["level"] == "problem"
    assert str(path) in preload["text"]
    assert "distributed.client.preload" in preload["text"]
    assert "add dask_gpurt.preload" in preload["remedy"]


def test_preload_list_replaced_by_the_environment_is_reported(shell: Shell) -> None:
    name = "DASK_DISTRIBUTED__SCHEDULER__PRELOAD"
    outcome = shell.gpurt("doctor", "--json", env={name: '["json"]'})
    assert outcome.code == 1
    assert name in found(outcome, "preload")[0]["text"]


def test_run_puts_a_replaced_preload_back(shell: Shell) -> None:
    shell.write("show.py", "import dask; print(dask.config.get('distributed.client.preload'))")
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = '["json"]'
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD_ARGV"] = "[[]]"
    names = ["dask_gpurt.preload", "json", "dask_gpurt.command.observe"]
    assert shell.gpurt("run", "show.py").out.strip() == str(names)


def test_single_preload_name_counts_as_a_list(shell: Shell) -> None:
    """Dask accepts a single name, too. Read letter by letter, it would let no client start."""
    shell.write("show.py", "import dask; print(dask.config.get('distributed.client.preload'))")
    shell.env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = "json"
    names = ["dask_gpurt.preload", "json", "dask_gpurt.command.observe"]
    assert shell.gpurt("run", "show.py").out.strip() == str(names)
    assert found(shell.gpurt("doctor", "--json"), "preload")[0]["level"] == "problem"
    outcome = shell.gpurt("doctor", "--json", env={"DASK_DISTRIBUTED__CLIENT__PRELOAD": "5"})
    assert found(outcome, "preload")[0]["level"] == "problem"


@pytest.mark.parametrize("text", ["gpurt: true\n", "gpurt:\n#  enabled: true\n"])
def test_file_without_a_gpurt_section_is_accepted(
    shell: Shell, user_yaml: Callable[[str], Path], text: str
) -> None:
    user_yaml(text)
    assert found(shell.gpurt("doctor", "--json"), "flag")


def test_unknown_key_and_bad_value_are_reported(shell: Shell) -> None:
    env = {"DASK_GPURT__SHUFFLE__MEMROY": "0.5", "DASK_GPURT__SHUFFLE__IN_FLIGHT": "many"}
    outcome = shell.gpurt("doctor", "--json", env=env)
    assert (outcome.code, outcome.json["problems"], outcome.err) == (1, 2, "")
    value, key = found(outcome, "settings")
    assert "gpurt.shuffle.in-flight is 'many'" in value["text"]
    assert "gpurt.shuffle.memroy" in key["text"]
    assert key["remedy"] == "did you mean gpurt.shuffle.memory?"


def test_a_value_in_place_of_the_section_is_reported(
    shell: Shell, user_yaml: Callable[[str], Path]
) -> None:
    """Dask drops it without a word, in a file as in the environment."""
    (in_environment,) = found(
        shell.gpurt("doctor", "--json", env={"DASK_GPURT": "true"}), "settings"
    )
    user_yaml("gpurt: on\n")
    outcome = shell.gpurt("doctor", "--json")
    (in_file,) = found(outcome, "settings")
    assert outcome.code == 1
    assert in_environment == in_file
    assert in_file["level"] == "problem"
    assert in_file["text"].startswith("gpurt is True, so it has no effect")


def test_unusable_machine_description_is_reported(shell: Shell) -> None:
    path = shell.write("machines.yaml", "hosts:\n- {name: a}\n")
    env = {"DASK_GPURT__TOPOLOGY__FILE": str(path)}
    outcome = shell.gpurt("doctor", "--json", env=env)
    assert (outcome.code, outcome.err) == (1, "")
    (value,) = found(outcome, "settings")
    assert (value["level"], value["text"][: len(str(path)) + 8]) == ("problem", f"{path}, line 2")
    shell.write("machines.yaml", "hosts:\n- {name: a, numa: [{name: n}]}\n")
    assert found(shell.gpurt("doctor", "--json", env=env), "settings")[0]["level"] == "ok"


def test_unsupported_distributed_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask_gpurt.plugins.patches import p2p

    monkeypatch.setattr(p2p, "unsupported_reason", lambda: "distributed 1 is too old")
    finding = findings.support()
    assert finding.level == "problem"
    assert "pip install" in finding.remedy


@pytest.mark.parametrize("policy", ["never", "unknown"])
def test_missing_huge_pages_are_reported(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    from dask_gpurt.devices.host_memory import pages

    monkeypatch.setattr(pages, "system_policy", lambda: policy)
    assert findings.huge_pages().level == "note"


@pytest.mark.parametrize(
    ("limits", "level", "n_workers"),
    [((256, 1024), "note", "129"), ((1024, 65536), "ok", "8,193"), ((-1, -1), "ok", "8,193")],
)
def test_workers_that_open_files_are_enough_for(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], level: str, n_workers: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    finding = findings.open_files()
    assert finding.level == level
    assert f" {n_workers} workers" in finding.text


# ------------------------------------------------------------------ no cluster


@pytest.mark.parametrize(
    "args",
    [
        ("status",),
        ("status", "--scheduler", "a:b:c"),
        ("status", "--scheduler", "no://a:1"),
        ("status", "--scheduler", "tcp://127.0.0.1:1"),
        ("status", "--scheduler-file", "no.json"),
        ("status", "--scheduler-file", "empty.json"),
        ("status", "--scheduler", "a", "--scheduler-file", "empty.json"),
        ("doctor", "--scheduler", "a:b:c"),
        ("doctor", "--scheduler-file", "no.json"),
    ],
)
def test_unreachable_scheduler_is_one_line(
    shell: Shell,
    args: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.chdir(shell.directory)
    shell.write("empty.json", "{}")
    with pytest.raises(SystemExit) as exit:
        gpurt.main(list(args))
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.err.startswith(f"dask gpurt {args[0]}: ")
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_no_output_follows_the_error_line(shell: Shell, command: str) -> None:
    """A client that never connected may complain once more when the interpreter ends."""
    outcome = shell.gpurt(command, "--scheduler", "a:b:c")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1
    assert "Traceback" not in outcome.out


@pytest.mark.parametrize("option", ["--bad", "--scheduler"])
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_wrong_option_is_one_line(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        gpurt.main([command, option])
    assert exit.value.code == 2
    assert option in capsys.readouterr().err


def test_silent_scheduler_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connect, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert examine(address, None, as_json=False) == 2
    printed = capsys.readouterr()
    problem = f"no scheduler answers at {address}: it sends nothing for 0.3 s"
    assert printed.err.startswith(f"dask gpurt doctor: {problem}; check the port")
    assert len(printed.err.splitlines()) == 1
    # Findings about this process are still reported.
    assert "pandas" in printed.out
    assert "-> check the port" in printed.out


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("command", ["doctor", "status", "topology"])
def test_closed_port_is_reported_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """distributed itself would try again until its timeout."""
    with pytest.MonkeyPatch.context() as patch:
        # The test never waits for this timeout.
        patch.setattr(connect, "CONNECT_TIMEOUT_S", 3600.0)
        with pytest.raises(SystemExit) as exit:
            gpurt.main([command, "--scheduler", f"127.0.0.1:{closed_port()}"])
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dask gpurt {command}: no scheduler answers at 127.0.0.1:")
    assert "nothing listens on that port; start the scheduler" in said


@pytest.mark.parametrize("address", ["somewhere", "tcp://10.0.0.1:port", "10.0.0.1"])
def test_an_address_needs_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(address, None, as_json=False) == 2
    printed = capsys.readouterr()
    assert f"{address} is not an address with a port" in printed.err
    assert "-> write it like tcp://10.0.0.1:8786" in printed.out


def test_unknown_host_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert examine("tcp://no.such.host.invalid:8786", None, as_json=False) == 2
    printed = capsys.readouterr()
    assert "there is no host 'no.such.host.invalid'" in printed.err
    assert "-> correct the name of the host" in printed.out


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2\r\n", b"220 mail\r\n", b""])
def test_address_of_another_program_is_reported(
    words: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            client.sendall(words)
            client.close()

        with ThreadPoolExecutor(1) as threads:
            answering = threads.submit(answer)
            address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
            assert examine(address, None, as_json=False) == 2
            answering.result()
    assert "another program listens on that port; correct the port" in capsys.readouterr().err


@pytest.mark.cluster
def test_worker_address_gets_advice_on_the_scheduler_address(
    sides: Sides, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = next(iter(sides.stock.scheduler_info()["workers"]))
    assert examine(worker, None, as_json=False) == 2
    printed = capsys.readouterr()
    assert f"{worker}: that is a Worker; give the address of the scheduler" in printed.err
