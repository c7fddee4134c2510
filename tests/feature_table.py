"""Writes what the tests find about ``tests.features`` to ``docs/features.md``.

``python -m tests.feature_table`` fills in the columns of the JAX that it runs with, and leaves
those of other versions unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Before anything imports jax: as in the tests.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests import conftest, framework_features  # noqa: F401 - eight devices, and more rows
from tests.features import FEATURES, Feature, Found, find

PATH = Path(__file__).parents[1] / "docs" / "features.md"

#: The entry for a version that has not been tested yet.
UNKNOWN = "?"

_HEAD = """# What works, and what gains

`python -m tests.feature_table` makes this page from `tests/features.py`, with the oldest and the
newest JAX that we test. Do not edit it by hand.
A row *works* if value and gradient equal those of the undecorated function. It *gains* if the
compiler for CPU needs at least 5 % less memory for temporaries than without the decorator. "-"
means that there is nothing to gain, because there is no backward pass or nothing is compiled as a
whole. *Refused* means that an error says what to do.
"""


def version() -> str:
    """The running JAX, as in the names of columns."""
    return ".".join(jax.__version__.split(".")[:2])


def read(text: str) -> dict[str, dict[tuple[str, str], tuple[str, str]]]:
    """The table as committed: by version, by (group, name), what works and what gains."""
    found: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
    group, versions = "", list[str]()
    for line in text.splitlines():
        if line.startswith("## "):
            group = line[3:]
        if not line.startswith("| "):
            continue
        name, *cells, _ = (cell.strip() for cell in line.strip("|").split(" | "))
        if name == "feature":
            versions = [cell.removeprefix("JAX ").split(":")[0] for cell in cells[::2]]
        elif not name.startswith("---"):
            for own, works, gains in zip(versions, cells[::2], cells[1::2], strict=True):
                found.setdefault(own, {})[group, name] = works, gains
    return found


def written(known: Mapping[str, Mapping[tuple[str, str], tuple[str, str]]]) -> str:
    """The document; rows unknown to a version get a question mark."""
    versions = sorted(known, key=lambda name: [int(part) for part in name.split(".")])
    lines = [_HEAD]
    for group in dict.fromkeys(feature.group for feature in FEATURES):
        titles = [f"JAX {own}: {what}" for own in versions for what in ("works", "gains")]
        lines += [f"## {group}", "", _line(["feature", *titles, "note"])]
        lines.append(_line(["---"] * (len(titles) + 2)))
        for feature in FEATURES:
            if feature.group == group:
                cells = [
                    cell
                    for own in versions
                    for cell in known[own].get(key(feature), (UNKNOWN, UNKNOWN))
                ]
                lines.append(_line([feature.name, *cells, feature.note]))
        lines.append("")
    return "\n".join(lines)


def key(feature: Feature) -> tuple[str, str]:
    """What identifies a row."""
    return feature.group, feature.name


def cells(found: Found) -> tuple[str, str]:
    """What is written about what was found."""
    return found.works, found.gains


def _line(parts: list[str]) -> str:
    return f"| {' | '.join(parts)} |"


def main() -> None:
    """Finds everything with this JAX, and writes it down."""
    known: dict[str, dict[tuple[str, str], tuple[str, str]]] = (
        read(PATH.read_text()) if PATH.exists() else {}
    )
    own = known[version()] = {}
    for feature in FEATURES:
        found = find(feature)
        own[key(feature)] = cells(found)
        print(f"{feature.group}: {feature.name}: {cells(found)} {found.detail}", flush=True)
    PATH.write_text(written(known))


if __name__ == "__main__":
    main()
