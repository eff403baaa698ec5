"""All calls of torch.distributed among ranks on several hosts, in every placement."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases import together
from tests.cluster.hosts import Hosts
from tests.cluster.jobs import BACKEND, check_results, start_ranks, torchrun

# Names of cases that any number of ranks run together, or two, or four.
CASES_OF_ANY = [case.__name__ for case in together.OF_ANY]
CASES_OF_TWO = [case.__name__ for case in together.OF_TWO]
CASES_OF_FOUR = [case.__name__ for case in together.OF_FOUR]
if BACKEND != "gloo":
    CASES_OF_ANY += [case.__name__ for case in together.DSCOMM_OF_ANY]
    CASES_OF_TWO += [case.__name__ for case in together.DSCOMM_OF_TWO]
    CASES_OF_FOUR += [case.__name__ for case in together.DSCOMM_OF_FOUR]


def groups(results: list[dict[str, Any]]) -> set[str]:
    return {group for result in results for group in result["digests"]}


def test_collectives_with_one_rank_on_each_of_two_hosts(make_hosts: Callable[[int], Hosts]) -> None:
    cases = CASES_OF_ANY + CASES_OF_TWO
    with start_ranks(make_hosts(2), [0, 1], "checks.py", "all", *cases) as job:
        results = check_results(job, at_least=600)
        assert all(result["cases"] == cases for result in results)


def test_collectives_with_two_ranks_on_each_of_two_hosts(
    make_hosts: Callable[[int], Hosts],
) -> None:
    """Started by torchrun, as most jobs are."""
    # A second gloo group would find the addresses of the first in the store.
    again = ["again"] if BACKEND != "gloo" else []
    cases = CASES_OF_ANY + CASES_OF_FOUR
    with torchrun(make_hosts(2), 2, "checks.py", "all", *again, *cases) as job:
        results = check_results(job, at_least=900)
        subsets = {"on host 0", "on host 1", "one of each host", "all but the first"}
        assert groups(results) == {"world", "first and last", *subsets, *again}


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0, 1, 2, 3], id="one on each of four", marks=pytest.mark.drill),
        pytest.param([0, 1, 0, 1], id="interleaved", marks=pytest.mark.drill),
        pytest.param([0, 1, 1, 1], id="one and three", marks=pytest.mark.drill),
        pytest.param([1, 1, 0, 1, 0, 1, 1], id="two and five, mixed", marks=pytest.mark.drill),
        pytest.param([1, 0, 1], id="one and two, mixed"),
    ],
)
def test_collectives_with_every_placement_of_ranks(
    make_hosts: Callable[[int], Hosts], placement: list[int]
) -> None:
    hosts = make_hosts(max(placement) + 1)
    with start_ranks(hosts, placement, "checks.py", "few") as job:
        assert "world" in groups(check_results(job, at_least=300))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param([0, 0, 1, 1, 2, 3], id="two on two of them"),
        pytest.param([0, 0, 1, 1, 2, 2, 3, 3], id="two on each", marks=pytest.mark.drill),
    ],
)
def test_leaders_of_four_hosts_relay_the_member_tables(
    make_hosts: Callable[[int], Hosts], placement: list[int]
) -> None:
    """As with many hosts; and the collectives are correct."""
    hosts = make_hosts(4)
    env = {"DSCOMM_RELAY_HOSTS": "2", "DSCOMM_DEBUG": "debug"}
    with start_ranks(hosts, placement, "checks.py", "few", env=env) as job:
        assert "one of each host" in groups(check_results(job, at_least=300))
        if BACKEND != "gloo":
            output = "".join(process.output() for process in job.processes.values())
            assert output.count("the member table of") >= 3 * 2, output[-3000:]
            assert "the member table comes from the store" not in output, output[-3000:]
            for first in (
                *("all_reduce in the header", "all_reduce by exchange", "all_gather in the header"),
                *("reduce_scatter in the header", "reduce_scatter by exchange", "gather in blocks"),
                *("scatter in blocks", "all_to_all in blocks", "barrier in the header"),
            ):
                assert re.search(rf" \(mpi, \d ranks\): first {first}: ", output), first
            for first in ("all_gather in steps", "gather in blocks", "barrier in steps"):
                group = f"group '0' (hierarchical, {len(placement)} ranks)"
                assert f"{group}: first {first}: " in output, first


# Open MPI uses these libraries for fast networks; here over TCP.
OTHER_NETWORK_LIBRARIES = {
    "ucx": {
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_pml_ucx_tls": "any",
        "OMPI_MCA_pml_ucx_devices": "any",
        "UCX_TLS": "tcp,self",
    },
    "libfabric": {
        "OMPI_MCA_pml": "cm",
        "OMPI_MCA_mtl": "ofi",
        "OMPI_MCA_mtl_ofi_provider_include": "tcp;ofi_rxm",
    },
}


@pytest.mark.parametrize("library", OTHER_NETWORK_LIBRARIES)
def test_collectives_over_libraries_for_fast_networks(
    make_hosts: Callable[[int], Hosts], library: str
) -> None:
    env = {"DSCOMM_MPI": "openmpi", **OTHER_NETWORK_LIBRARIES[library]}
    with start_ranks(make_hosts(2), [0, 0, 1], "checks.py", "few", env=env) as job:
        assert "world" in groups(check_results(job, at_least=300))


HALVES = [
    # bfloat16 lacks 257: a host that rounds makes 256 of 256 and 1.
    ({}, 256.0, "hierarchical"),
    ({"DSCOMM_WIRE_HALVES": "float32"}, 258.0, "hierarchical"),
    # One Team of all ranks, over MPI alone, adds in rank order and rounds once.
    ({"DSCOMM_HIERARCHY": "flat"}, 258.0, "mpi, 4 ranks"),
]
if BACKEND == "gloo":
    HALVES = []  # gloo has only one way


@pytest.mark.parametrize(("settings", "expected", "team"), HALVES, ids=["half", "float32", "flat"])
def test_bfloat16_sum_is_rounded_as_configured(
    make_hosts: Callable[[int], Hosts], settings: dict[str, str], expected: float, team: str
) -> None:
    values = ["256", "1", "1", "0"]
    with start_ranks(make_hosts(2), [0, 0, 1, 1], "halves.py", *values, env=settings) as job:
        for result in job.results():
            assert result["sum"] == expected and result["team"].startswith(team), result
        assert job.hosts.leftovers(limit_s=5.0) == {}


def test_collectives_with_flat_hierarchy_are_correct(make_hosts: Callable[[int], Hosts]) -> None:
    env = {"DSCOMM_HIERARCHY": "flat"}
    with start_ranks(
        make_hosts(2), [0, 1, 0, 1], "checks.py", "few", *CASES_OF_ANY, env=env
    ) as job:
        check_results(job, 100)


def test_data_is_sent_completely_when_a_call_returns(make_hosts: Callable[[int], Hosts]) -> None:
    """One host's uplink is slow, so its ranks get their results before their own data has been
    sent."""
    hosts = make_hosts(2)
    hosts[0].set_rate("qdisc replace dev eth0 root tbf rate 100mbit burst 32kb latency 50ms")
    sizes = ["60000", "2000000"]
    with start_ranks(hosts, [0, 0, 1, 1], "waits_elsewhere.py", *sizes) as job:
        job.finish(60.0)
        assert set(job.exit_codes().values()) == {0}, job.report()
