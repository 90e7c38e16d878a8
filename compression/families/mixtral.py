"""Mixtral, which names its experts' matrices w1 (gate), w3 (up) and w2 (down)."""

from forebay.compression.families.base import Family

MIXTRAL = Family(
    model_types=("mixtral",),
    experts="model.layers.{layer}.block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
    module_names={"block_sparse_moe.": "mlp."},
)
