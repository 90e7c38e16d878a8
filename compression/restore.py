"""Reading compressed checkpoints: checking them, and writing the dense model back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forebay.compression.checkpoint import NAMES, SCALES, ParserConfig, check_layer, from_tensors, parse_config
from forebay.compression.errors import CheckpointError, CompressionError
from forebay.compression.layer import CompressedLayer
from forebay.compression.output import CheckpointWriter, copy_other_files, copy_weights
from forebay.compression.source import ModelFolder

Report = Callable[[int, int], None]


class CompressedFolder(ModelFolder):
    """A folder that `compress` wrote.

    Raises:
        CheckpointError: it is none, or of another version.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.parser: ParserConfig = parse_config(self.config.get("quantization_config"))

    def read_layer(self, layer: int) -> CompressedLayer:
        """One compressed layer, checked.

        Raises:
            CheckpointError: naming what is missing or wrong.
        """
        prefix = self.family.prefix(layer)
        check_layer(prefix, layer, self.parser, self.get, self.names)
        return from_tensors(prefix, self.get)

    def layer_names(self) -> set[str]:
        """Tensors of all compressed layers."""
        return {f"{self.family.prefix(layer)}.{name}" for layer in self.parser.layers for name in self.parser.names}

    def verify(self, report: Report = lambda *_: None) -> None:
        """Read everything there is.

        Raises:
            CheckpointError: naming the first thing that is missing or wrong.
        """
        for done, layer in enumerate(self.parser.layers):
            report(done, len(self.parser.layers))
            self.read_layer(layer)
        for name in self.names:
            self.get(name)
        prefixes = [self.family.prefix(layer) for layer in range(self.layers)]
        ours = {f"{prefix}.{name}" for prefix in prefixes for name in NAMES + SCALES} & self.names
        if unknown := sorted(ours - self.layer_names()):
            field = "backbone_dtype has no scales"
            if not any(unknown[0].startswith(f"{self.family.prefix(layer)}.") for layer in self.parser.layers):
                field = "kept does not name its layer"
            raise CheckpointError(f"{unknown[0]} is there, but quantization_config.{field}")

    def restore(self, out: Path, report: Report = lambda *_: None) -> None:
        """Write the dense reconstruction: a plain checkpoint for any other tool.

        Raises:
            CompressionError: `out` exists, or the checkpoint is damaged.
        """
        if out.exists():
            raise CompressionError(f"{out} exists already; give another folder with --out, or remove it")
        work = out.with_name(out.name + ".partial")
        work.mkdir(parents=True, exist_ok=True)
        writer = CheckpointWriter(work)
        for done, layer in enumerate(self.parser.layers):
            report(done, len(self.parser.layers))
            made = self.read_layer(layer)
            for expert in range(self.parser.experts):
                dense = made.dense(expert)
                for part, matrix in enumerate((dense.gate_HD, dense.up_HD, dense.down_DH)):
                    writer.add(self.family.expert_tensor(layer, expert, part), matrix)
        copy_weights(self, writer, self.layer_names())
        copy_other_files(self, work)
        writer.finish({key: value for key, value in self.config.items() if key != "quantization_config"})
        work.rename(out)
