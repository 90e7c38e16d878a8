"""Peak memory of a compression, against one MoE layer and its calibration rows: `peak_rss_vs_layer`.

A model with two layers of random weights is compressed in a process of its own, after a model of 16 MB: what Python,
PyTorch and transformers need for that is not counted; the details have it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forebay.bench.moe.quality import MODEL
from forebay.bench.suite import Context, Measurement
from forebay.storage.errors import ForebayError

EXPERTS, UNITS, SIZE, TOP = 60, 704, 1024, 4
QUICK_EXPERTS = 32
LENGTH = 128
ROWS = 256
PROBE = """
import json, sys
from pathlib import Path
from forebay.compression.layer import Options
from forebay.compression.run import Settings, compress
def peak():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) * 1024
paths = {{"text": Path(sys.argv[4]), "cache": Path(sys.argv[2] + "-cache")}}
settings = Settings(**json.loads(sys.argv[3]) | paths, options=Options(max_rounds=1))
compress(Path(sys.argv[5]), Path(sys.argv[2] + "-small"), settings)
before = peak()
compress(Path(sys.argv[1]), Path(sys.argv[2]), settings)
print("RESULT", json.dumps([before, peak()]), flush=True)
""".replace("{{", "{").replace("}}", "}")


def measure(context: Context) -> Measurement:
    """The ratio.

    Raises:
        ForebayError: the compression failed.
    """
    experts = QUICK_EXPERTS if context.quick else EXPERTS
    context.say("making a model")
    model = _make_model(context.work / "model", experts)
    text = context.work / "text.txt"
    sequences = experts * ROWS // TOP // LENGTH
    text.write_text(" ".join(str(number * 7919 % 100_003) for number in range(sequences * LENGTH)))
    context.say("compressing it")
    settings = {"sequences": sequences, "length": LENGTH, "rows": ROWS, "layers": "all", "allow_unseen": True}
    before, peak = _run([str(model), str(context.work / "out"), json.dumps(settings), str(text), str(MODEL)])
    layer = 3 * experts * UNITS * SIZE * 2
    rows = experts * ROWS * SIZE * 4
    details = {
        "experts": experts, "layer_bytes": layer, "row_bytes": rows, "peak_bytes": peak, "idle_bytes": before,
        "with_idle": peak / (layer + rows),
    }  # fmt: skip
    return Measurement({"peak_rss_vs_layer": (peak - before) / (layer + rows)}, details)


def _run(arguments: list[str]) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise ForebayError(f"compression failed: {done.stderr.strip().splitlines()[-1]}")
    before, peak = json.loads(found[0].removeprefix("RESULT "))
    return before, peak


def _make_model(folder: Path, experts: int) -> Path:
    """Two MoE layers with random weights in bfloat16, and the tokenizer of the small trained model."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    sizes: dict[str, Any] = {
        "hidden_size": SIZE, "moe_intermediate_size": UNITS, "num_experts": experts, "num_experts_per_tok": TOP,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 256,
        "shared_expert_intermediate_size": 256, "vocab_size": 4096, "max_position_embeddings": 1024,
    }  # fmt: skip
    disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder
