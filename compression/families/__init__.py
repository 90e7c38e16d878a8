"""Model families that can be compressed. A new one is one small file here and one name below."""

from __future__ import annotations

from forebay.compression.errors import ModelError
from forebay.compression.families.base import Family
from forebay.compression.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from forebay.compression.families.mixtral import MIXTRAL
from forebay.compression.families.olmoe import OLMOE
from forebay.compression.families.qwen_moe import QWEN_MOE

FAMILIES = (QWEN_MOE, DEEPSEEK_V2, DEEPSEEK_V3, OLMOE, MIXTRAL)


def find_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ModelError: there is none.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ModelError(f"model_type {model_type!r} is none that can be compressed; known are {known}")


__all__ = ["FAMILIES", "Family", "find_family"]
