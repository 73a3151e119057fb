"""Write docs/reference/configuration.md from the schema and the defaults of the package.

    python docs/make_configuration.py            rewrite the page
    python docs/make_configuration.py --check    exit with 1 if the page is out of date

Reads `dask_gpurt/gpurt-schema.yaml` and `dask_gpurt/gpurt.yaml`; needs PyYAML and nothing else.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "dask_gpurt" / "gpurt-schema.yaml"
DEFAULTS = ROOT / "dask_gpurt" / "gpurt.yaml"
PAGE = ROOT / "docs" / "reference" / "configuration.md"

BEFORE = """\
# Configuration

<!-- Written by docs/make_configuration.py from the schema and the defaults. Do not edit. -->

All settings are keys under `gpurt.` in [Dask's
configuration](https://docs.dask.org/en/stable/configuration.html). Set them in a YAML file that
Dask reads, in an environment variable, or with `dask.config.set` before the client is created.

"""

AFTER = """\
## Three ways to set a key

In a YAML file that Dask reads, such as `~/.config/dask/gpurt-mine.yaml`:

```yaml
gpurt:
  enabled: true
  shuffle:
    memory: 0.4
```

In the environment: `DASK_`, then the key in capitals, with two underscores for each dot and one for
each hyphen:

```bash
export DASK_GPURT__ENABLED=true
export DASK_GPURT__SHUFFLE__MEMORY=0.4
```

In the program, before the client is created:

```python
import dask

dask.config.set({"gpurt.enabled": True, "gpurt.shuffle.memory": 0.4})
```

## Which process's settings count

One process reads the settings, once: the client with the flag when it connects, or the caller of
`dask_gpurt.enable(client)`. The settings travel to the scheduler and apply to the whole cluster,
for shuffles that start afterwards. A later client with the flag replaces them for everybody. A
scheduler with the flag in its own configuration starts with its own settings.

The new value of `gpurt.collectives.enabled` does not apply while the runtime is on: call
`dask_gpurt.disable(client)` first.

`gpurt.memory` settings apply only to workers that start afterwards. A running worker keeps its
store until it restarts, for example by `client.restart()`.

If two programs with the flag share a cluster, the settings of the last one to connect apply to
both. After `dask_gpurt.disable(client)`, the next program that connects with the flag switches
the runtime on again.

Workers do not read `gpurt.*` settings of their own. A task may create a client: with
`get_client`, with `worker_client`, with an address, in a thread or in a process. Such a client
never switches the runtime on and never changes a setting. To do so on purpose, the task calls
`dask_gpurt.enable(client)`. If a task starts a cluster of its own, its clients set that cluster's
settings. One exception: if a program runs the whole cluster in its own process, a client in a
thread that a task started counts as the program's client.

Unknown keys are logged as a warning. An invalid value is logged as an error, and stock Dask runs.

## If you set a preload list of your own

Dask loads the runtime through lists of preloads, which the installed defaults set:

```yaml
@PRELOADS@```

Workers need no preload: the scheduler sends them a plugin.

Dask does not merge lists: the last file that sets one wins. This has two consequences.

- A file of yours (in `~/.config/dask`, or wherever `DASK_CONFIG` points) or an environment
  variable that sets `distributed.client.preload` or `distributed.scheduler.preload` replaces our
  entry, and the flag does nothing. Add `dask_gpurt.preload` to your list:

  ```yaml
  distributed:
    client:
      preload: [my_company.preload, dask_gpurt.preload]
      preload-argv: [[], []]
  ```

  If `preload-argv` is a list of lists, it needs one list for each preload.
- Our list replaces a list in `/etc/dask`, because Dask reads the environment's `etc/dask` after
  it. Set the merged list in a file that Dask reads later, such as one in `~/.config/dask`.

`dask gpurt doctor` names the file or variable that replaced our entry. `dask gpurt run` adds the
entry by itself. `dask_gpurt.enable(client)` does not need it.
"""


def keys(section: Mapping[str, Any], prefix: str = "gpurt.") -> Iterator[tuple[str, Any]]:
    """Every key that has a value, with its schema."""
    for name, schema in section["properties"].items():
        if "properties" in schema:
            yield from keys(schema, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", schema


def variable(key: str) -> str:
    """Environment variable that sets a key."""
    return "DASK_" + key.upper().replace("-", "_").replace(".", "__")


def page() -> str:
    """The whole page."""
    schema = yaml.safe_load(SCHEMA.read_text())["properties"]["gpurt"]
    defaults = yaml.safe_load(DEFAULTS.read_text())
    parts = [BEFORE, "## Keys\n\n"]
    for key, about in keys(schema):
        default: Any = defaults
        for name in key.split("."):
            default = default[name]
        kinds = [f"`{value}`" for value in about["enum"]] if "enum" in about else about["type"]
        kinds = kinds if isinstance(kinds, list) else [kinds]
        value = yaml.safe_dump(default).splitlines()[0]
        sentence = textwrap.fill(" ".join(about["description"].split()), 110)
        parts.append(
            f"### `{key}`\n\n{sentence}\n\n"
            f"| | |\n|---|---|\n| default | `{value}` |\n| type | {' or '.join(kinds)} |\n"
            f"| environment | `{variable(key)}` |\n\n"
        )
    preloads = yaml.safe_dump({"distributed": defaults["distributed"]}, default_flow_style=None)
    parts.append(AFTER.replace("@PRELOADS@", preloads))
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/reference/configuration.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    wanted = page()
    if not options.check:
        PAGE.write_text(wanted)
        return 0
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    print(
        "docs/reference/configuration.md is stale: run python docs/make_configuration.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
