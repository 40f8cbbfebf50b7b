"""What the servers need: an interpreter that has the server, and a port each."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from collections import Counter
from urllib.parse import urlsplit

from opd_core.config import ExperimentConfig
from opd_core.lifecycle.ports import port_is_free
from opd_core.preflight.report import PreflightReport
from opd_core.serving.servers import Server, run_servers

HERE = frozenset({"127.0.0.1", "localhost", "::1", socket.gethostname()})
SERVER_MODULE = {"sglang": "sglang", "lmdeploy": "lmdeploy"}


def check_servers(config: ExperimentConfig, report: PreflightReport) -> None:
    """Each server that the run starts can be started, at a port of its own."""
    servers = run_servers(config)
    _check_reach(config, report)
    for server in servers:
        _check_interpreter(server, report)
    ports = Counter(server.port for server in servers if server.port is not None)
    for port, servers_there in sorted(ports.items()):
        if servers_there > 1:
            report.problems.append(
                f"port {port} is given to {servers_there} servers: change all but one, or "
                "leave the port out (a free one is then taken)"
            )
        if not port_is_free(port):
            who = next(server.who for server in servers if server.port == port)
            report.problems.append(
                f"{who}: port {port} is in use on 127.0.0.1; free it, or leave the port out "
                "(a free one is then taken)"
            )


def _check_reach(config: ExperimentConfig, report: PreflightReport) -> None:
    """A launched server listens on this host's loopback: a job elsewhere cannot reach it."""
    address = config.ray.address
    host = urlsplit(address).hostname if address else None
    if host is not None and run_servers(config) and host not in HERE:
        report.problems.append(
            f"ray.address {address} is another host, and a launched teacher listens on this one's "
            "loopback only: start the teacher yourself and name its 'endpoint'"
        )


def _check_interpreter(server: Server, report: PreflightReport) -> None:
    python, module = server.launch.python, SERVER_MODULE.get(server.backend)
    if python is not None:
        if shutil.which(python) is None:
            report.problems.append(
                f"{server.who}: {server.settings}.python {python!r} is not executable"
            )
    elif module is not None and importlib.util.find_spec(module) is None:
        report.problems.append(
            f"{server.who}: {server.backend} is not installed here; it needs an environment of its "
            f"own: set {server.settings}.python to that environment's interpreter"
        )
