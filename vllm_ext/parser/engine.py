"""Which settings of the engine a compressed checkpoint can be served with. Imports no vLLM: see `plugin`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.compression.checkpoint import ParserConfig
from forebay.compression.sharding import EngineError, check_ranks

SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size", "-ep": "--enable-expert-parallel"}
SHARED = "its experts share one backbone"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Those that matter here."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    balance_experts: bool = False
    adapters: bool = False
    load_format: str = "auto"

    @classmethod
    def of_command_line(cls, arguments: Sequence[str]) -> EngineSettings:
        """From the options of `vllm serve`; what cannot be read is left to vLLM."""
        found: dict[str, str] = {}
        for option, following in zip(arguments, [*arguments[1:], ""], strict=False):
            name, _, attached = option.partition("=")
            if name.startswith("-"):
                found[SHORT.get(name, name.replace("_", "-"))] = attached or following
        return cls(
            tensor_parallel=_number(found.get("--tensor-parallel-size")),
            data_parallel=_number(found.get("--data-parallel-size")),
            expert_parallel="--enable-expert-parallel" in found,
            balance_experts="--enable-eplb" in found,
            adapters="--enable-lora" in found,
            load_format=found.get("--load-format", "auto"),
        )

    def check(self, parser: ParserConfig) -> None:
        """Refuse what compressed experts cannot do, before vLLM fails on it in its own words.

        Raises:
            EngineError: naming the option.
        """
        refused = {
            "--enable-expert-parallel": (self.expert_parallel, SHARED),
            "--enable-eplb": (self.balance_experts, SHARED),
            f"--data-parallel-size {self.data_parallel}": (self.data_parallel > 1, SHARED),
            "--enable-lora": (self.adapters, "adapters of experts need dense weights"),
            "--load-format dummy": (self.load_format == "dummy", "its weights say which units are kept"),
        }
        for option, (given, reason) in refused.items():
            if given:
                raise EngineError(
                    f"{option} does not work with a compressed checkpoint: {reason}; leave it out "
                    f"(--tensor-parallel-size works), or serve the dense model that forebay compress restore writes"
                )
        check_ranks(parser.hidden_units, self.tensor_parallel)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() and int(text) > 0 else 1
