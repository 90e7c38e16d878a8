"""OLMoE."""

from forebay.compression.families.base import Family

OLMOE = Family(model_types=("olmoe",), last_layers={16: 11})
