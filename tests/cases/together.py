"""The cases that ranks of several hosts run, too, by the number of ranks that each needs."""

from __future__ import annotations

from collections.abc import Callable

from tests.cases import collectives, groups, layouts, point_to_point, training, work

Case = Callable[[], None]

OF_ANY: list[Case] = [
    point_to_point.batch_case,
    work.semantics_case,
    work.lifetime_case,
    groups.threads_case,
    training.functional_case,
    collectives.coalescing_manager_case,
]
OF_TWO: list[Case] = [
    point_to_point.blocking_case,
    point_to_point.tags_case,
    point_to_point.order_case,
    point_to_point.crossing_case,
    work.callbacks_case,
    groups.orders_case,
]
OF_FOUR: list[Case] = [point_to_point.source_of_subgroup_case, groups.mesh_case]

# gloo fails these.
DSCOMM_OF_ANY: list[Case] = [
    collectives.not_a_number_case,
    collectives.refused_reductions_case,
    layouts.lazy_bits_case,
]
DSCOMM_OF_TWO: list[Case] = [
    point_to_point.beside_collectives_case,
    collectives.premultiplied_case,
    collectives.null_work_case,
]
DSCOMM_OF_FOUR: list[Case] = [groups.subgroups_case, groups.split_case]

_ALL = OF_ANY + OF_TWO + OF_FOUR + DSCOMM_OF_ANY + DSCOMM_OF_TWO + DSCOMM_OF_FOUR
BY_NAME = {case.__name__: case for case in _ALL}
assert len(BY_NAME) == len(_ALL), "two cases have one name"
