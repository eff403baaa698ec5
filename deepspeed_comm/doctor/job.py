"""Checks of the job: the launcher's variables, and the networks for groups of several hosts."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from deepspeed_comm import _launcher_variables
from deepspeed_comm.doctor import child
from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import Finding

_ASK_ADDRESS = "import socket, sys; socket.getaddrinfo(sys.argv[1], None)"
_ADDRESS_LIMIT_S = 10.0

# From <linux/if.h> and <linux/sockios.h>.
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK = 0x8912, 0x8913, 0x891B
_REQUEST_BYTES = 40
_MOST_ADDRESSES = 1024


def check_launcher(finding: Finding, examination: Examination) -> None:
    given = {name: os.environ[name] for name in _launcher_variables.REQUIRED if name in os.environ}
    place = _launcher_variables.find_place(os.environ)
    finding.facts.update(given=given, launcher=place.launcher if place else None)
    if given:
        finding.say(", ".join(f"{name}={text}" for name, text in given.items()))
        _check_numbers(finding, given)
        if "MASTER_ADDR" in given:
            _check_address(finding, given["MASTER_ADDR"], examination.limit_s)
    if place is not None:
        finding.facts.update(rank=place.rank, size=place.size, addresses=list(place.addresses))
        finding.say(
            f"{place.launcher}: rank {place.rank} of {place.size}, rank 0's host "
            f"{' or '.join(place.addresses) or 'unknown'}"
        )
        if not place.addresses and "MASTER_ADDR" not in given:
            finding.warn(
                f"{place.launcher} does not name rank 0's host",
                "set MASTER_ADDR to it on all ranks",
            )
    if not given and place is None:
        finding.say(
            "none: init_distributed() makes a world of one rank, init_process_group() needs a rank"
        )
    missing = [name for name in _launcher_variables.REQUIRED[:3] if name not in given]
    if given and missing and place is None and given.get("WORLD_SIZE") != "1":
        finding.warn(
            f"not set: {', '.join(missing)} (set: {', '.join(given)})",
            "start the program with torchrun, mpirun or srun, or set all of "
            f"{', '.join(_launcher_variables.REQUIRED)} on every rank",
        )


def _check_numbers(finding: Finding, given: Mapping[str, str]) -> None:
    numbers: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if name not in given:
            continue
        if given[name].isdigit():
            numbers[name] = int(given[name])
        else:
            finding.problem(
                f"{name}={given[name]} is not a number", "check how the ranks are started"
            )
    if numbers.get("RANK", 0) >= numbers.get("WORLD_SIZE", sys.maxsize):
        finding.problem(
            f"RANK={given['RANK']} is not in a world of {given['WORLD_SIZE']}",
            "ranks count from 0 to WORLD_SIZE - 1",
        )
    if not 0 < numbers.get("MASTER_PORT", 1) < 1 << 16:
        finding.problem(
            f"MASTER_PORT={given['MASTER_PORT']} is not a port", "choose one from 1024 to 65535"
        )


def _check_address(finding: Finding, address: str, limit_s: float) -> None:
    # In a child process, because a resolver may hang.
    command = [sys.executable, "-I", "-S", "-c", _ASK_ADDRESS, address]
    answer = child.run(command, min(limit_s, _ADDRESS_LIMIT_S))
    if answer.ended:
        finding.problem(
            f"MASTER_ADDR={address} cannot be resolved ({answer.reason})",
            "set it to an address of rank 0's host, or to a name that this host can resolve",
        )


def check_networks(finding: Finding, examination: Examination) -> None:
    interfaces = own_interfaces()
    finding.facts.update(interfaces=[f"{name} {network}" for name, network in interfaces])
    there = ", ".join(f"{name} ({network})" for name, network in interfaces) or "none"
    finding.say(f"for groups of several hosts: {there}")
    adapters = fast_adapters()
    finding.facts.update(adapters=adapters)
    if adapters:
        finding.say(f"adapters for which MPI has special libraries: {', '.join(adapters)}")
    for wanted in filter(None, os.environ.get("DSCOMM_IFNAME", "").split(",")):
        if not any(_matches(wanted, name, network) for name, network in interfaces):
            finding.problem(
                f"DSCOMM_IFNAME: '{wanted}' is neither the name of an interface that is up nor the "
                "network of one (only IPv4 is checked here)",
                f"choose an interface that is up and not loopback: {there}",
            )


def _matches(wanted: str, name: str, network: str) -> bool:
    if wanted == name:
        return True
    if "/" not in wanted:
        return False
    try:
        return ipaddress.ip_interface(network).ip in ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return False


def fast_adapters() -> list[str]:
    """Adapters of InfiniBand, RoCE, Omni-Path, EFA, Slingshot and BXI, as in
    csrc/mpi/host_networks.cc."""
    kinds = ("infiniband", "cxi", "bxi")
    return sorted(adapter.name for kind in kinds for adapter in Path("/sys/class", kind).glob("*"))


def own_interfaces() -> list[tuple[str, str]]:
    """(name, address/prefix) of each IPv4 address of interfaces that are up, running and not
    loopback. csrc/core/transport/networks.cc lists IPv6 addresses, too."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for request in _interface_requests(asker):
            label = request[:16].rstrip(b"\0").decode(errors="replace")
            (flags,) = struct.unpack_from("=H", fcntl.ioctl(asker, _SIOCGIFFLAGS, request), 16)
            if flags & _LOOPBACK or not flags & _UP or not flags & _RUNNING:
                continue
            mask = fcntl.ioctl(asker, _SIOCGIFNETMASK, request)[20:24]
            prefix = bin(int.from_bytes(mask, "big")).count("1")
            # A second address has a suffix in its label: "eth0:1".
            found.append((label.split(":")[0], f"{socket.inet_ntoa(request[20:24])}/{prefix}"))
    return found


def _interface_requests(asker: socket.socket) -> list[bytes]:
    """A struct ifreq for each IPv4 address of this host."""
    room = array.array("B", bytes(_REQUEST_BYTES * _MOST_ADDRESSES))
    address, room_bytes = room.buffer_info()
    answer = fcntl.ioctl(asker, _SIOCGIFCONF, struct.pack("iL", room_bytes, address))
    (used,) = struct.unpack_from("i", answer)
    data = room.tobytes()[:used]
    return [data[start : start + _REQUEST_BYTES] for start in range(0, used, _REQUEST_BYTES)]
