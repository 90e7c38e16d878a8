"""DeepSeek-V2 and -V3, and Moonlight, which is of the latter kind."""

from forebay.compression.families.base import Family

DEEPSEEK_V2 = Family(model_types=("deepseek_v2",), last_layers={27: 18})
DEEPSEEK_V3 = Family(model_types=("deepseek_v3",), scoring="sigmoid", last_layers={27: 18})
