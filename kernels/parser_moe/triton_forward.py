"""Forward pass on a GPU: dense matmuls of the backbone by torch, all else in our kernels.

What else is: the residuals, and the matmuls of a backbone in int8.

Nothing waits for the device, and every shape follows from shapes: a CUDA graph can capture it. Few tokens (at most one
pair per expert on average) take kernels that read residual rows once per pair; more take kernels on blocks of pairs of
one expert. Results do not depend on the order in which programs run: no kernel uses atomics.
Shape letters as in `triton_math`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay.kernels.parser_moe import triton_tuning as tuning
from forebay.kernels.parser_moe.triton_backbone import hidden_int8, output_int8
from forebay.kernels.parser_moe.triton_down import down_few, down_many
from forebay.kernels.parser_moe.triton_group import group_pairs
from forebay.kernels.parser_moe.triton_hidden import hidden_few, hidden_many
from forebay.kernels.parser_moe.triton_mix import mix_hidden

if TYPE_CHECKING:
    from torch import Tensor

    from forebay.kernels.parser_moe.triton_tuning import Blocks
    from forebay.kernels.parser_moe.weights import ParserWeights

CHUNK = 1024
"""Ids that one step of `group_pairs` reads (our choice)."""
MIX_H = 512
"""Units that one step of `mix_hidden` takes (our choice)."""
UNEVEN = 2
"""Programs per expert and block of pairs, times the mean number of unit blocks: the longest experts keep several times
the mean, and a program without a unit ends at once (our choice)."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_2(number: int) -> int:
    """The smallest one that is no less than `number`."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Call:
    """One forward pass: its inputs, contiguous, and its sizes."""

    x_TD: Tensor
    w_TK: Tensor
    ids_TK: Tensor
    weights: ParserWeights
    activation: str
    T: int
    K: int
    E: int
    H: int
    D: int
    W: int
    """Units that an expert keeps at most, as far as shapes tell."""

    @property
    def pairs(self) -> int:
        """P."""
        return self.T * self.K

    @property
    def few(self) -> bool:
        """Whether the variant for few tokens runs."""
        return self.pairs <= self.E

    @property
    def block_t(self) -> int:
        """Pairs of a block, about those of one expert."""
        return min(128, max(16, power_of_2(cdiv(self.pairs, self.E))))

    @property
    def backbone_t(self) -> int:
        """Tokens of a block, for a backbone in int8."""
        return min(128, max(16, power_of_2(self.T)))

    def strides(self, block_r: int) -> int:
        """Programs that share the unit blocks of one expert."""
        mean: float = UNEVEN * self.weights.indices_R.shape[0] / self.E
        return max(1, min(cdiv(self.W, block_r), round(mean / block_r)))

    def key(self, kernel: str) -> tuple[object, ...]:
        """What the best block sizes of `kernel` depend on."""
        rows = power_of_2(self.pairs) if self.few else -self.block_t
        return (kernel, rows, self.E, self.K, self.H, self.D, self.x_TD.dtype, self.x_TD.device)


def forward(
    x_TD: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, weights: ParserWeights, activation: str
) -> Tensor:
    """y_TD of the layer, as `reference.forward`; products of hidden values are rounded to the dtype of `x_TD`."""
    (T, D), K, H = x_TD.shape, topk_ids_TK.shape[1], weights.gate_HD.shape[0]
    if T * K == 0:
        return torch.zeros_like(x_TD)
    inputs = x_TD.contiguous(), topk_weights_TK.contiguous(), topk_ids_TK.contiguous()
    W = min(H, weights.indices_R.shape[0])
    call = Call(*inputs, weights, activation, T, K, weights.experts, H, D, W)
    with torch.cuda.device_of(x_TD):
        g_TH, u_TH = backbone_hidden(call)
        h_PW = x_TD.new_empty(call.pairs, W)
        y_TD = few_tokens(call, g_TH, u_TH, h_PW) if call.few else many_tokens(call, g_TH, u_TH, h_PW)
        return backbone_output(call, mix(call, g_TH, u_TH, h_PW), y_TD)


def backbone_hidden(call: Call) -> tuple[Tensor, Tensor]:
    """g_TH and u_TH, the backbone's gate and up before the activation."""
    weights = call.weights
    if weights.gate_HD.dtype is not torch.int8:
        return call.x_TD @ weights.gate_HD.T, call.x_TD @ weights.up_HD.T
    g_TH, u_TH = call.x_TD.new_empty(call.T, call.H), call.x_TD.new_empty(call.T, call.H)

    def launch(blocks: Blocks) -> None:
        hidden_int8[(cdiv(call.H, blocks.r), cdiv(call.T, call.backbone_t))](
            call.x_TD, weights.gate_HD, weights.up_HD, weights.gate_scale_H, weights.up_scale_H, g_TH, u_TH, call.T,
            call.H, call.D, call.backbone_t, blocks.r, blocks.d, **blocks.options(),
        )  # fmt: skip

    launch(choose_backbone(call, "hidden_int8", launch))
    return g_TH, u_TH


def backbone_output(call: Call, mixed_TH: Tensor, residual_TD: Tensor) -> Tensor:
    """y_TD: what the residuals add, and the backbone's down."""
    weights = call.weights
    if weights.down_DH.dtype is not torch.int8:
        return torch.addmm(residual_TD, mixed_TH, weights.down_DH.T)
    y_TD = torch.empty_like(call.x_TD)

    def launch(blocks: Blocks) -> None:
        output_int8[(cdiv(call.D, blocks.r), cdiv(call.T, call.backbone_t))](
            mixed_TH, weights.down_DH, weights.down_scale_D, residual_TD, y_TD, call.T, call.H, call.D,
            call.backbone_t, blocks.r, blocks.d, **blocks.options(),
        )  # fmt: skip

    launch(choose_backbone(call, "output_int8", launch))
    return y_TD


def choose_backbone(call: Call, kernel: str, launch: Callable[[Blocks], None]) -> Blocks:
    """The fastest configuration of a kernel of `triton_backbone`."""
    dtype, block_t = call.x_TD.dtype, call.backbone_t
    key = (kernel, -block_t, call.E, call.K, call.H, call.D, dtype, call.x_TD.device)
    return tuning.choose(key, tuning.many(tuning.BACKBONE_INT8, block_t, dtype), launch)


def few_tokens(call: Call, g_TH: Tensor, u_TH: Tensor, h_PW: Tensor) -> Tensor:
    """Fills h_PW and returns what the residual down rows add, y_TD."""
    weights = call.weights
    y_TD = torch.empty_like(call.x_TD)

    def hidden(blocks: Blocks) -> None:
        hidden_few[(call.pairs, call.strides(blocks.r))](
            call.x_TD, call.ids_TK, g_TH, u_TH, weights.residual_gate_RD, weights.residual_up_RD, weights.indices_R,
            weights.offsets_E1, h_PW, call.E, call.K, call.H, call.D, call.W, call.activation, blocks.r, blocks.d,
            **blocks.options(),
        )  # fmt: skip

    def down(blocks: Blocks) -> None:
        down_few[(call.T, cdiv(call.D, blocks.d))](
            call.ids_TK, call.w_TK, h_PW, weights.residual_down_RD, weights.offsets_E1, y_TD, call.E, call.K, call.D,
            call.W, blocks.r, blocks.d, **blocks.options(),
        )  # fmt: skip

    hidden(tuning.choose(call.key("hidden_few"), tuning.HIDDEN_FEW, hidden))
    down(tuning.choose(call.key("down_few"), tuning.DOWN_FEW, down))
    return y_TD


def many_tokens(call: Call, g_TH: Tensor, u_TH: Tensor, h_PW: Tensor) -> Tensor:
    """As `few_tokens`, on blocks of pairs of one expert."""
    weights, block_t, block_e = call.weights, call.block_t, power_of_2(call.E + 1)
    order_P, starts = group(call)
    y_PD = call.x_TD.new_empty(call.pairs, call.D)
    # The sum over groups of ceil(pairs / block_t) is not known here, only that it is no more than this.
    block_count = (call.pairs + min(call.E + 1, call.pairs) * (block_t - 1)) // block_t

    def hidden(blocks: Blocks) -> None:
        hidden_many[(call.strides(blocks.r), block_count)](
            call.x_TD, order_P, starts, g_TH, u_TH, weights.residual_gate_RD, weights.residual_up_RD,
            weights.indices_R, weights.offsets_E1, h_PW, call.E, call.K, call.H, call.D, call.W, call.activation,
            block_e, block_t, blocks.r, blocks.d, **blocks.options(),
        )  # fmt: skip

    def down(blocks: Blocks) -> None:
        down_many[(cdiv(call.D, blocks.d), block_count)](
            order_P, starts, call.w_TK, h_PW, weights.residual_down_RD, weights.offsets_E1, y_PD, call.E, call.D,
            call.W, block_e, block_t, blocks.r, blocks.d, **blocks.options(),
        )  # fmt: skip

    dtype = call.x_TD.dtype
    hidden(tuning.choose(call.key("hidden_many"), tuning.many(tuning.HIDDEN_MANY, block_t, dtype), hidden))
    down(tuning.choose(call.key("down_many"), tuning.many(tuning.DOWN_MANY, block_t, dtype), down))
    return y_PD.view(call.T, call.K, call.D).sum(1)


def group(call: Call) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, and where each expert begins (E + 2 entries; group E is not this rank's)."""
    order_P = call.ids_TK.new_empty(call.pairs, dtype=torch.int32)
    starts = call.ids_TK.new_empty(call.E + 2, dtype=torch.int32)
    group_pairs[(call.E + 1,)](call.ids_TK, order_P, starts, call.pairs, call.E, CHUNK, **tuning.PLAIN.options())
    return order_P, starts


def mix(call: Call, g_TH: Tensor, u_TH: Tensor, h_PW: Tensor) -> Tensor:
    """Router-weighted hidden values of each token over its experts, T x H."""
    sums_TH = torch.empty_like(g_TH, dtype=torch.float32)
    mixed_TH = torch.empty_like(g_TH)
    mix_hidden[(call.T,)](
        call.ids_TK, call.w_TK, g_TH, u_TH, h_PW, call.weights.indices_R, call.weights.offsets_E1, sums_TH, mixed_TH,
        call.E, call.K, call.H, call.W, call.activation, MIX_H, **tuning.PLAIN.options(),
    )  # fmt: skip
    return mixed_TH
