"""Model families that can be run. A new one is one small file here and one name below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.diffusion.errors import ModelError
from forebay.diffusion.families.base import Family
from forebay.diffusion.families.dream import DREAM
from forebay.diffusion.families.llada import LLADA
from forebay.diffusion.families.llama import LLAMA

FAMILIES = (LLADA, DREAM, LLAMA)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        ModelError: there is none.
    """
    found = config.get("architectures") or ["none"]
    for family in FAMILIES:
        if found[0] in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise ModelError(f"architecture {found[0]!r} is no diffusion model that can be run; known are {known}")


__all__ = ["FAMILIES", "Family", "find_family"]
