"""Least-squares refit of the down columns that an expert keeps (ours, beyond the paper).

A kept unit stands beside units that have become the backbone's, and can make up for part of what those lost: its column
of down is chosen so that the expert's output on its calibration rows changes least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.compression.experts import Expert
from forebay.compression.importance import Activation, hidden

RIDGE = 0.01
"""Weight of the penalty on the change, as a share of the mean energy of the kept units (our choice)."""
SMALLEST = 1e-20
"""Penalty on the change where no row reaches a kept unit."""


def refit_down(rows_ND: Tensor, full: Expert, base: Expert, kept: Tensor, activation: Activation) -> Tensor:
    """What to add to the kept columns of down, (D, k).

    Minimises |h C^T - E|^2 + r |C|^2 over the change C, where h are the kept units' values for the rows and E is the
    error that the other units make together.

    Args:
        rows_ND: inputs of this expert.
        full: the expert, aligned with the backbone, float32.
        base: the backbone, float32.
        kept: units that stay.
        activation: of the gate.
    """
    rows = rows_ND.float()
    own, shared = hidden(rows, full, activation), hidden(rows, base, activation)
    error_ND = own @ full.down_DH.T - shared @ base.down_DH.T
    error_ND -= own[:, kept] @ full.down_DH[:, kept].T - shared[:, kept] @ base.down_DH[:, kept].T
    values = own[:, kept]
    gram = values.T @ values
    penalty = RIDGE * gram.diagonal().mean() + SMALLEST
    solved: Tensor = torch.linalg.solve(gram + penalty * torch.eye(len(kept)), values.T @ error_ND)
    return solved.T
