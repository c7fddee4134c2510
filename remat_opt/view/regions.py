"""The program of a plan as regions, in them modules, in them values: what folds, and how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Fates, in the order in which they are shown.
FATES = ("kept", "recomputed", "not needed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A region, or a module in one.

    Attributes:
      label: what to call it.
      bytes: of its values, by fate.
      seconds: of what it computes again.
      count: how many values it has.
      children: the modules inside.
      values: numbers, among the plan's decisions, of the values that are in none of these.
    """

    label: str
    bytes: tuple[int, int, int]
    seconds: float
    count: int
    children: tuple[Node, ...]
    values: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all its values."""
        return sum(self.bytes)

    def all(self) -> Iterator[Node]:
        """The node and all inside, outermost first."""
        yield self
        for child in self.children:
            yield from child.all()


def regions(plan: Mapping[str, Any]) -> list[Node]:
    """The regions of a plan, in order.

    Args:
      plan: what ``Plan.to_dict`` gives.
    """
    decisions = plan["decisions"]
    members: list[list[int]] = [[] for _ in plan["stages"]]
    for number, one in enumerate(decisions):
        members[one["region"]].append(number)
    found = []
    for number, (stage, own) in enumerate(zip(plan["stages"], members, strict=True)):
        label = f"Region {number + 1}" + ("" if stage["checkpointed"] else ", not checkpointed")
        found.append(_node(label, own, decisions, (), is_region=True))
    return found


def span(node: Node, decisions: Sequence[Mapping[str, Any]]) -> str:
    """The modules of a region from first to last; "" where there are none."""
    modules = [decisions[number]["name"]["module"] for number in _members(node)]
    named = [module for module in modules if module]
    if not named:
        return ""
    shared = _shared([module.split("/") for module in named])
    prefix = "/".join(shared)
    ends = [
        "/".join(one.split("/")[len(shared) : len(shared) + 1]) for one in (named[0], named[-1])
    ]
    if not all(ends) or ends[0] == ends[1]:
        return prefix or ends[0]
    return f"{prefix}{'/' if prefix else ''}{ends[0]} to {ends[1]}"


def _members(node: Node) -> list[int]:
    return sorted(number for one in node.all() for number in one.values)


def _node(
    label: str,
    own: Sequence[int],
    decisions: Sequence[Mapping[str, Any]],
    path: tuple[str, ...],
    *,
    is_region: bool = False,
) -> Node:
    """The values below a path of modules; a module with one module alone is told with it."""
    groups: dict[str, list[int]] = {}
    values = []
    depth = len(path)
    for number in own:
        module = decisions[number]["name"]["module"]
        parts = module.split("/") if module else []
        if len(parts) > depth:
            groups.setdefault(parts[depth], []).append(number)
        else:
            values.append(number)
    if len(groups) == 1 and not values:
        ((name, inner),) = groups.items()
        # A region is told by its number, whatever it is in.
        longer = label if is_region else f"{label}/{name}"
        return _node(longer, inner, decisions, (*path, name), is_region=is_region)
    sizes = [
        sum(decisions[n]["bytes"] for n in own if decisions[n]["fate"] == fate) for fate in FATES
    ]
    children = tuple(_node(name, inner, decisions, (*path, name)) for name, inner in groups.items())
    return Node(
        label=label,
        bytes=(sizes[0], sizes[1], sizes[2]),
        seconds=sum(decisions[n]["seconds"] * decisions[n]["times"] for n in own),
        count=len(own),
        children=children,
        values=tuple(values),
    )


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    found = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return found
