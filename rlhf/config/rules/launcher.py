"""Rules for the config group ``launcher``, and for its hostfile."""

from __future__ import annotations

import re

from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.schema.launcher import LauncherConfig
from rlhf.config.schema.run import RunConfig

LAST_PORT = 65535


def check_launcher(launcher: LauncherConfig) -> None:
    """Check the port; the hostfile is checked only on the node that launches the ranks."""
    port = launcher.master_port
    if port > LAST_PORT:
        raise ConfigError(f"launcher.master_port={port}: the last port is {LAST_PORT}")


def check_hostfile(config: RunConfig) -> None:
    """Check that the hostfile names hardware.nodes nodes, each with ranks_per_node slots."""
    name, hardware = config.launcher.hostfile, config.hardware
    assert name is not None

    def explain(reason: str) -> ConfigError:
        return ConfigError(
            f"launcher.hostfile={name} cannot be read ({reason.removesuffix(f': {name}')}): "
            "give a file with one `name slots=N` per line"
        )

    with translate_errors(explain):
        lines = read_user_text(expand_user_path(name, key="launcher.hostfile")).splitlines()
    hosts: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        host, slots = _parse_line(line, place=f"{name}:{number}")
        if host in hosts:
            raise ConfigError(f"{name}:{number}: {host} is listed twice; keep one line per host")
        if slots != hardware.ranks_per_node:
            raise ConfigError(
                f"{name}:{number}: {host} has slots={slots}, and "
                f"hardware.ranks_per_node={hardware.ranks_per_node}; make them equal"
            )
        hosts.add(host)
    if len(hosts) != hardware.nodes:
        raise ConfigError(
            f"launcher.hostfile={name} names {len(hosts)} nodes, and hardware.nodes="
            f"{hardware.nodes}; make them equal"
        )


def _parse_line(line: str, *, place: str) -> tuple[str, int]:
    """Return the host name and the number of slots from one line of the host file."""
    found = re.fullmatch(r"\s*(\S+)\s+slots=(\d+)\s*(?:#.*)?", line)
    if found is None:
        raise ConfigError(
            f"{place}: {line.strip()}: must be `name slots=N`, with N ranks on the node"
        )
    return found[1], int(found[2])
