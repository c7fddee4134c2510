"""The table in the docs says what is found; see ``tests.features``."""

from __future__ import annotations

import pytest

from tests import feature_table, framework_features  # noqa: F401 - adds rows
from tests.features import FEATURES, Feature, find

pytestmark = pytest.mark.usefixtures("quick_search")


def _id(feature: Feature) -> str:
    return f"{feature.group}: {feature.name}"


def committed() -> dict[tuple[str, str], tuple[str, str]]:
    """What the table says about this JAX; for one that is too new, about the last it knows."""
    known = feature_table.read(feature_table.PATH.read_text(encoding="utf-8"))
    return known.get(feature_table.version(), list(known.values())[-1])


def test_every_row_is_in_the_table() -> None:
    text = feature_table.PATH.read_text(encoding="utf-8")
    assert feature_table.written(feature_table.read(text)) == text
    assert set(committed()) == {feature_table.key(feature) for feature in FEATURES}
    assert feature_table.UNKNOWN not in {cell for row in committed().values() for cell in row}


def test_rows_have_names_of_their_own() -> None:
    assert len({feature_table.key(feature) for feature in FEATURES}) == len(FEATURES)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("feature", FEATURES, ids=_id)
def test_what_the_table_says(feature: Feature) -> None:
    pytest.importorskip(feature.package)
    found = find(feature)
    assert feature_table.cells(found) == committed()[feature_table.key(feature)], found.detail
