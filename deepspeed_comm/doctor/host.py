"""Checks of the host: processors, memory, descriptors, and the conditions for shared memory.

dscomm shares memory by passing descriptors over abstract Unix sockets, so ranks need the same
network namespace and user. It does not use process_vm_readv, ptrace or files in /dev/shm, so limits
on these do not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import mmap
import os
import resource
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from deepspeed_comm._launcher_variables import ranks_of_host
from deepspeed_comm._machine import core_count, describe_place
from deepspeed_comm.doctor.examination import Examination, setting
from deepspeed_comm.doctor.job import fast_adapters
from deepspeed_comm.doctor.report import Finding

_CGROUPS = Path("/sys/fs/cgroup")
# As in csrc/core: the memory left to other programs (base/memory_reservation.cc), the smallest
# arena, and the inverse share of the address space that an arena may take (shm/memory/arena.cc).
_SPARE_BYTES = 16 << 20
_LEAST_ARENA_BYTES = 1 << 20
_ARENA_SHARE = 16
# The defaults of csrc/core/base/settings.h.
_STAGING_BYTES, _CHUNK_BYTES, _ARENA_BYTES = 2560 << 10, 512 << 10, 1 << 30
_LEAST_CHUNKS = 4  # in the staging memory
_PAGE_OF_LINES = 4096
# Open MPI's use of /dev/shm for each rank of a host, as in csrc/pmix/main.cc.
_MPI_SHARED_BYTES = 8 << 20
# Descriptors of a rank for dscomm and the job's store, besides two for each other rank.
_OWN_DESCRIPTORS = 12
# Descriptors that programs usually need: files, and the workers of a DataLoader.
_USUAL_DESCRIPTORS = 256
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, of Linux 5.1


def check_processors(finding: Finding, examination: Examination) -> None:
    cpus = os.sched_getaffinity(0)
    online = os.cpu_count() or len(cpus)
    quota = cpu_quota()
    ranks = ranks_of_host(os.environ)
    cores = core_count(cpus)
    finding.facts.update(
        cpus=sorted(cpus),
        cpus_online=online,
        cores=cores,
        cpu_quota=None if math.isinf(quota) else quota,
        ranks_of_host=ranks,
    )
    limited = "" if math.isinf(quota) else f", and its cgroup allows the time of {quota:g} cpus"
    finding.say(f"{describe_place()}, {cores} core{'' if cores == 1 else 's'}{limited}")
    if ranks is None:
        return
    finding.say(f"the launcher starts {ranks} ranks on this host")
    # A bound rank sees only its own CPUs. Other ranks may have the others, so all CPUs count.
    room = min(quota, online if len(cpus) < online else cores)
    if ranks > room:
        finding.warn(
            f"{ranks} ranks share {room:g} cores: waiting ranks slow down computing ones",
            "start at most one rank per core, or give the job more cores",
        )


def cpu_quota() -> float:
    """The CPU quota of this process's cgroups, in CPUs; inf without a limit."""
    quotas = [math.inf]
    for controllers, folder in _cgroup_folders("cpu"):
        with contextlib.suppress(OSError, ValueError):  # a group without this controller, or "max"
            if controllers:
                most = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            else:
                most, period = (folder / "cpu.max").read_text().split()
            if int(most) > 0:
                quotas.append(int(most) / int(period))
    return min(quotas)


def _cgroup_folders(controller: str) -> Iterator[tuple[str, Path]]:
    """(controllers of v1, or "" for v2; folder) of this process's cgroups and their parents."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # a kernel without cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        place = Path(path.lstrip("/"))
        for above in (place, *place.parents):
            yield controllers, root / above


@dataclasses.dataclass(frozen=True)
class Room:
    """The available memory in bytes, and the limit that decides it."""

    available_bytes: float
    limit: str


def memory_room() -> Room:
    """The minimum of MemAvailable and the cgroups' limits, as in csrc/core/base/memory_limit.cc."""
    rooms = [Room(math.inf, "no limit")]
    with contextlib.suppress(OSError):  # without it, the cgroups decide
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                rooms.append(Room(int(line.split()[1]) * 1024, "MemAvailable"))
    for controllers, folder in _cgroup_folders("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        with contextlib.suppress(OSError, ValueError):  # as in cpu_quota()
            most, used = (int((folder / name).read_text()) for name in names[:2])
            statistics = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
            droppable = min(int(statistics.get(names[2], 0)), used)
            rooms.append(Room(most - used + droppable, f"{names[0]} of {folder}"))
    return min(rooms, key=lambda room: room.available_bytes)


def check_memory(finding: Finding, examination: Examination) -> None:
    room = memory_room()
    ranks = ranks_of_host(os.environ) or 2
    staging = max(
        setting("DSCOMM_STAGING_BYTES", _STAGING_BYTES),
        _LEAST_CHUNKS * setting("DSCOMM_STAGING_CHUNK_BYTES", _CHUNK_BYTES),
    )
    needed = ranks * (staging + _PAGE_OF_LINES) + _SPARE_BYTES
    finding.facts.update(
        available_bytes=None if math.isinf(room.available_bytes) else int(room.available_bytes),
        limited_by=room.limit,
        needed_bytes=needed,
    )
    finding.say(f"{_size(room.available_bytes)} available, limited by {room.limit}")
    if room.available_bytes < needed:
        finding.problem(
            f"{ranks} ranks need {_size(needed)} for a first group",
            "give the job more memory, or lower DSCOMM_STAGING_BYTES",
        )
    _check_memfd(finding)
    _check_address_space(finding)
    _check_locked_memory(finding)
    _check_shared_folder(finding, examination, ranks)


def _check_memfd(finding: Finding) -> None:
    """Makes shared memory like an arena."""
    try:
        descriptor = os.memfd_create("dscomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        finding.problem(
            f"memfd_create fails: {error.strerror}",
            "allow it in the seccomp profile of the container; dscomm's shared memory needs it",
        )
        return
    try:
        os.truncate(descriptor, mmap.PAGESIZE)
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
            try:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | _FUTURE_WRITE)
                finding.say("memfd: works; peers can map it for reading only")
            except OSError:
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                finding.say("memfd: works")
                finding.warn(
                    "this kernel cannot make it read-only for peers",
                    "use Linux 5.1 or newer; until then, ranks must trust each other",
                )
    except OSError as error:
        finding.problem(
            f"a memfd can be created, but not used: {error.strerror}",
            "check ulimit -f, ulimit -v, and the seccomp profile of the container",
        )
    finally:
        os.close(descriptor)


def _check_address_space(finding: Finding) -> None:
    wanted = setting("DSCOMM_ARENA_BYTES", _ARENA_BYTES)
    for which, name, option, share in (
        (resource.RLIMIT_FSIZE, "file size", "-f", 1),
        (resource.RLIMIT_AS, "address space", "-v", _ARENA_SHARE),
    ):
        soft, _ = resource.getrlimit(which)
        finding.facts[f"limit_{name.replace(' ', '_')}"] = _limit_or_none(soft)
        if soft == resource.RLIM_INFINITY:
            continue
        left = soft - (_mapped_bytes() if which == resource.RLIMIT_AS else 0)
        arena = max(left, 0) // share
        finding.say(f"the limit on {name} (ulimit {option}) is {_size(soft)}")
        if arena < _LEAST_ARENA_BYTES:
            finding.problem(
                f"ulimit {option} leaves {_size(arena)} for shared memory; the minimum is 1.0 MiB",
                f"raise it: ulimit {option} unlimited",
            )
        elif arena < wanted:
            finding.warn(
                f"ulimit {option} leaves {_size(arena)} for a rank's shared memory, of the "
                f"{_size(wanted)} of DSCOMM_ARENA_BYTES, so fewer groups fit",
                f"raise it: ulimit {option} unlimited",
            )


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _check_locked_memory(finding: Finding) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    finding.facts["limit_locked_memory"] = _limit_or_none(soft)
    if fast_adapters() and soft != resource.RLIM_INFINITY:
        finding.warn(
            f"the limit on locked memory (ulimit -l) is {_size(soft)}, and MPI locks its data on "
            f"{', '.join(fast_adapters())}",
            "raise it for the user of the ranks: ulimit -l unlimited",
        )


def _check_shared_folder(finding: Finding, examination: Examination, ranks: int) -> None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        finding.facts["dev_shm"] = None
        finding.say(f"/dev/shm: {error.strerror}; dscomm does not need it")
        return
    finding.facts["dev_shm"] = {"bytes": usage.total, "free_bytes": usage.free}
    text = f"/dev/shm: {_size(usage.total)}, {_size(usage.free)} free; dscomm does not need it"
    has_open_mpi = examination.mpi.setting == "openmpi" and examination.transport_file
    if has_open_mpi and usage.free < ranks * _MPI_SHARED_BYTES:
        text += ", and Open MPI uses the folder for temporary files instead"
    finding.say(text)


def check_folders(finding: Finding, examination: Examination) -> None:
    wish = os.environ.get("TMPDIR", "")
    temporary = wish if wish.startswith("/") else "/tmp"
    home = os.environ.get("HOME", "")
    finding.facts.update(temporary=temporary, home=home or None)
    finding.say(f"temporary files: {temporary}; home: {home or 'HOME is not set'}")
    if not os.access(temporary, os.W_OK | os.X_OK):
        finding.problem(
            f"{temporary}, the folder for temporary files, is not writable",
            "set TMPDIR to a writable folder on a local disk; groups of several hosts need it",
        )
    if home and not os.access(home, os.R_OK | os.X_OK):
        finding.warn(
            f"HOME={home} is not readable: Open MPI has settings there, torch.compile caches",
            "set HOME to a readable folder; a container may lack the user's",
        )


def check_descriptors(finding: Finding, examination: Examination) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd")) - 1  # without listdir's own
    ranks = ranks_of_host(os.environ) or 2  # without a launcher, the fewest that communicate
    # A rank has a descriptor for each peer; the rank that runs the job's store, two for each.
    needed = opened + _OWN_DESCRIPTORS + 2 * ranks
    finding.facts.update(soft=_limit_or_none(soft), hard=_limit_or_none(hard), open=opened)
    finding.facts.update(needed=needed)
    finding.say(
        f"the limit is {_number(soft)} (ulimit -n), at most {_number(hard)}; {opened} are open"
    )
    usual = _USUAL_DESCRIPTORS + needed
    if soft == resource.RLIM_INFINITY or soft >= usual:
        return
    advice = f"raise the limit: ulimit -n {usual}, or more"
    if hard != resource.RLIM_INFINITY and hard < usual:
        advice = (
            f"have the hard limit raised to {usual} or more (limits.conf, or an option of the "
            "container)"
        )
    if soft < needed:
        finding.problem(f"a rank among {ranks} on this host needs about {needed}", advice)
    else:
        finding.warn(
            f"a rank among {ranks} on this host needs about {needed}, which leaves few for files "
            "and data loaders",
            advice,
        )


def check_sharing(finding: Finding, examination: Examination) -> None:
    names = {}
    for name in ("net", "pid", "user", "ipc", "mnt"):
        with contextlib.suppress(OSError):  # the check below warns of missing ones
            names[name] = os.readlink(f"/proc/self/ns/{name}")
    container = _container()
    finding.facts.update(user=os.geteuid(), namespaces=names, container=container)
    finding.say(
        f"ranks share memory if they run as user {os.geteuid()} in the network namespace "
        f"{names.get('net', 'unknown')}; other namespaces may differ"
    )
    if container:
        finding.say(
            f"this is a container ({container}); containers with separate networks count as hosts"
        )
    if "net" not in names or not Path("/proc/sys/kernel/random/boot_id").exists():
        finding.warn(
            "/proc has no boot id or no network namespace",
            "mount /proc; until then, ranks ask every member whether it is on this host",
        )
    _check_sockets(finding)
    _check_process_descriptors(finding)


def _container() -> str:
    """The sign that this is a container, or ""."""
    for mark in ("/.dockerenv", "/run/.containerenv"):
        if os.path.exists(mark):
            return mark
    for name in ("container", "KUBERNETES_SERVICE_HOST", "SINGULARITY_CONTAINER"):
        if name in os.environ:
            return f"{name}={os.environ[name]}"
    return ""


def _check_sockets(finding: Finding) -> None:
    """Connects two sockets by an abstract name, as ranks do."""
    name = b"\0dscomm-doctor-" + secrets.token_hex(8).encode()
    try:
        with contextlib.ExitStack() as ends:
            listener = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(name)
            listener.listen(1)
            caller = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            caller.settimeout(5)
            caller.connect(name)
            listener.settimeout(5)
            ends.enter_context(listener.accept()[0])
        finding.say("abstract Unix sockets: work")
    except OSError as error:
        finding.problem(
            f"abstract Unix sockets fail: {error}",
            "allow them in the security profile of the container; ranks connect with them",
        )


def _check_process_descriptors(finding: Finding) -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
        finding.say("descriptors of processes (pidfd): work")
    except (OSError, AttributeError) as error:
        finding.warn(
            f"pidfd_open fails: {error}",
            "use Linux 5.3 or newer, and allow it in the container's seccomp profile; without it, "
            "errors do not show the state of a slow rank",
        )


def _limit_or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _number(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)


def _size(count: float) -> str:
    """Formats bytes: 1.5 GiB."""
    if math.isinf(count):
        return "any amount"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
