"""The program of a plan as a tree: regions hold regions, loops and modules, which hold values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remat_opt.view import plan_words

#: Fates, in the order in which they are shown.
FATES = ("kept", "recomputed", "not needed")

#: A value from ``plan_words.values``, and its number there.
_Numbered = tuple[int, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A region, or a loop or module inside one.

    Attributes:
      label: what to call it.
      said: more about it: which modules it goes through, what it keeps; or "".
      bytes: those of its values, by fate.
      seconds: time of what it computes again.
      count: how many values it has.
      children: what is inside.
      values: numbers of the values that are in none of its children.
    """

    label: str
    said: str
    bytes: tuple[int, int, int]
    seconds: float
    count: int
    children: tuple[Node, ...]
    values: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The bytes of all its values."""
        return sum(self.bytes)

    def all(self) -> Iterator[Node]:
        """The node and all inside, outermost first."""
        yield self
        for child in self.children:
            yield from child.all()


def regions(plan: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The regions of a plan, in order.

    Args:
      plan: what ``Plan.to_dict`` gives.
      values: its values from ``plan_words.values``, including those inside loops.
    """
    members: list[list[_Numbered]] = [[] for _ in plan["stages"]]
    for number, one in enumerate(values):
        members[one["region"]].append((number, one))
    return [
        _region(f"Region {number}", stage, own)
        for number, (stage, own) in enumerate(zip(plan["stages"], members, strict=True), start=1)
    ]


def _region(
    label: str, stage: Mapping[str, Any], own: Sequence[_Numbered], *, nested: bool = False
) -> Node:
    """A region, with the regions inside, or the modules.

    Args:
      label: what to call it.
      stage: what the plan says about it.
      own: its values.
      nested: whether it is inside another one.
    """
    title = label if stage["checkpointed"] else f"{label}, not checkpointed"
    said = [_span(own)]
    if not stage["inside"]:
        if nested and stage["kept"]:
            # The fates of its values describe a top-level region.
            said.append(f"keeps {plan_words.counted(len(stage['kept']), 'value')}")
        path = _shared([_path(one) for _, one in own])
        return _node(title, own, path, said=", ".join(filter(None, said)), is_region=True)
    said.append(f"runs again as {plan_words.counted(len(stage['inside']), 'region')}")
    place = {
        root: number for number, inner in enumerate(stage["inside"]) for root in inner["roots"]
    }
    members: list[list[_Numbered]] = [[] for _ in stage["inside"]]
    for number, one in own:
        members[place[one["root"]]].append((number, one))
    children = tuple(
        _region(f"{label}.{number}", inner, there, nested=True)
        for number, (inner, there) in enumerate(zip(stage["inside"], members, strict=True), start=1)
    )
    return _summed(title, ", ".join(filter(None, said)), own, children, ())


def _path(value: Mapping[str, Any]) -> list[str]:
    """The modules that contain a value, or the loop around it."""
    module = value["outer_module"]
    return module.split("/") if module else []


def _span(own: Sequence[_Numbered]) -> str:
    """The modules of a region from first to last; "" if there are none."""
    named = [path for _, one in own if (path := _path(one))]
    if not named:
        return ""
    shared = _shared(named)
    prefix = "/".join(shared)
    ends = ["/".join(one[len(shared) : len(shared) + 1]) for one in (named[0], named[-1])]
    if not all(ends) or ends[0] == ends[1]:
        return prefix or ends[0]
    return f"{prefix}{'/' if prefix else ''}{ends[0]} to {ends[1]}"


def _node(
    label: str,
    own: Sequence[_Numbered],
    path: tuple[str, ...],
    *,
    said: str = "",
    is_region: bool = False,
) -> Node:
    """The values below a path of modules; a module with a single inner module is merged with it."""
    groups: dict[str, list[_Numbered]] = {}
    loops: dict[int, list[_Numbered]] = {}
    values = []
    depth = len(path)
    for number, one in own:
        parts = _path(one)
        if len(parts) > depth:
            groups.setdefault(parts[depth], []).append((number, one))
        elif one["part"]:
            loops.setdefault(one["root"], []).append((number, one))
        else:
            values.append(number)
    if len(groups) == 1 and not values and not loops and not is_region:
        ((name, inner),) = groups.items()
        return _node(f"{label}/{name}", inner, (*path, name))
    children = [_node(name, inner, (*path, name)) for name, inner in groups.items()]
    children += [_loop(inner) for inner in loops.values()]
    return _summed(label, said, own, tuple(children), tuple(values))


def _loop(own: Sequence[_Numbered]) -> Node:
    """The values inside an opened equation, by iterations that run alike, or branches."""
    parts: dict[str, list[_Numbered]] = {}
    for number, one in own:
        parts.setdefault(one["part"], []).append((number, one))
    children = tuple(
        _summed(part, "", inner, (), tuple(number for number, _ in inner))
        for part, inner in parts.items()
    )
    outer = own[0][1]
    primitive = outer["outer_primitive"]
    label = primitive if primitive in ("cond", "shard_map") else "scan"
    return _summed(f"inside the {label}", outer["outer_source"], own, children, ())


def _summed(
    label: str,
    said: str,
    own: Sequence[_Numbered],
    children: tuple[Node, ...],
    values: tuple[int, ...],
) -> Node:
    sizes = [sum(one["bytes"] for _, one in own if one["fate"] == fate) for fate in FATES]
    return Node(
        label=label,
        said=said,
        bytes=(sizes[0], sizes[1], sizes[2]),
        seconds=sum(one["seconds"] * one["times"] for _, one in own),
        count=len(own),
        children=children,
        values=values,
    )


def _shared(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    found = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return tuple(found)
