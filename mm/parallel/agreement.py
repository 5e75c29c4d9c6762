"""Run something on all ranks and fail together: an error on one rank is raised on all of them."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mm.errors import AgreedError, UserError
from mm.parallel.mesh import Mesh

Result = TypeVar("Result")
Found = TypeVar("Found", bound=Hashable)


def together(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """Run ``action`` on every rank; if it fails on any, raise the same AgreedError on all."""
    result, problems = attempt(mesh, action)
    if found := all_of(problems, mesh.control_group):
        raise AgreedError(found)
    return cast(Result, result)  # no problem, so there is a result


def on_first(mesh: Mesh, action: Callable[[], Result]) -> Result:
    """Run ``action`` on rank 0 and give every rank its result, or its error."""
    outcome: list[Any] = [attempt(mesh, action) if mesh.rank == 0 else None]
    dist.broadcast_object_list(outcome, src=0, group=mesh.control_group)
    result, problems = outcome[0]
    if problems:
        raise AgreedError(problems)
    return result


def gather(mesh: Mesh, value: Result) -> list[Result]:
    """Every rank's value, on rank 0; elsewhere an empty list."""
    gathered: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(value, gathered, dst=0, group=mesh.control_group)
    return gathered or []


def by_rank(mesh: Mesh, value: Result) -> list[Result]:
    """Every rank's value, in the order of the ranks; the same on every rank."""
    gathered: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(gathered, value, group=mesh.control_group)
    return gathered


def all_of(found: tuple[Found, ...], group: dist.ProcessGroup | None) -> tuple[Found, ...]:
    """The union of ``found`` over the ranks of ``group``, without duplicates, in rank order; the same on every rank."""
    gathered: list[tuple[Found, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(gathered, found, group=group)
    return tuple(dict.fromkeys(thing for one in gathered for thing in one))


def attempt(mesh: Mesh, action: Callable[[], Result]) -> tuple[Result | None, tuple[str, ...]]:
    """Run ``action`` on this rank only; return its result, or None and the problems."""
    try:
        return action(), ()
    except UserError as error:
        return None, error.problems
    except OSError as error:
        return None, (f"rank {mesh.rank}: {error}",)
