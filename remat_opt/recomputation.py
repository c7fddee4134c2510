"""What the compiler did with a program's recomputation: the record that plans keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

#: The fields of a record that name places, and the most places each may name.
_PLACES, MOST_PLACES = ("merged", "not_kept"), 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the compiler did with a program's recomputation.

    Attributes:
      asked_products: matrix products and convolutions that the program computes again. The body
        of a loop counts once, here and below.
      compiled_products: those of them that the compiled program computes again.
      early_values: recomputed values that are already there while products of the forward pass run.
      compiler_values: values that the compiler's own rematerialisation computes again.
      merged: where the merged products are in the program, if known; the first few.
      not_kept: where the values are that the compiler recomputes rather than keeps; the first few.
    """

    asked_products: int
    compiled_products: int
    early_values: int
    compiler_values: int
    merged: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Recomputation:
        """The record with these fields, which ``is_recomputation`` accepts."""
        fields: dict[str, Any] = {
            key: tuple(found) if key in _PLACES else found for key, found in data.items()
        }
        return cls(**fields)

    @property
    def merged_products(self) -> int:
        """Recomputed products that the compiler merged with the originals."""
        return self.asked_products - self.compiled_products

    @property
    def undone(self) -> bool:
        """Whether some of the recomputation does not save the memory it was meant to save."""
        return self.merged_products > 0 or self.early_values > 0

    def text(self) -> str:
        """What happened to it, as part of a sentence."""
        said = "no matrix product or convolution was meant to be computed again"
        if self.asked_products:
            said = (
                f"{self.compiled_products} of {self.asked_products} matrix products and "
                "convolutions that were to be computed again are"
            )
        if self.merged_products:
            said += ", the others are merged with the originals" + in_brackets(self.merged)
        if self.early_values:
            said += (
                f"; {self.early_values} recomputed values are already computed during the "
                "forward pass, and wait"
            )
        return said


def in_brackets(places: Sequence[str]) -> str:
    """Places in brackets, to follow what is there; nothing if there are none."""
    return f" ({', '.join(places)})" if places else ""


def is_recomputation(data: object) -> bool:
    """Whether plain data is the fields of a ``Recomputation``."""
    return (
        isinstance(data, Mapping)
        and set(data) == {field.name for field in dataclasses.fields(Recomputation)}
        and all(
            isinstance(found, list | tuple) and all(isinstance(place, str) for place in found)
            if key in _PLACES
            else type(found) is int and found >= 0
            for key, found in data.items()
        )
        and data["compiled_products"] <= data["asked_products"]
    )
