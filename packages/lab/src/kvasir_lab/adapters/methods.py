"""Five ways to train a small change of a frozen matrix W, each as a module in place of ``nn.Linear``.

``parts`` are what ``kvasir convert to_lora`` reads. All begin as W itself.

Legend: N outputs, K inputs, R rank; every matrix multiplies column vectors, as ``nn.Linear.weight`` does.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

DAMPING = 0.01  # share of the mean of the covariance's diagonal that is added to it at first (CorDA's code)
PRECISE = 0.05  # largest ||C C^-1 - I|| for which the damping is enough (CorDA's code)


class Change(nn.Module):
    """A frozen matrix and a change of it. ``rank``: of plain LoRA with as many trained numbers; ``gram`` [K, K]: sum of
    x x^T over a calibration set, where ``calibrated``. ``lr``: learning rate that suits the parameters' sizes."""

    calibrated = False
    lr = 2e-3

    def __init__(self, weight: torch.Tensor, rank: int, seed: int, gram: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)
        self.outputs, self.inputs = weight.shape
        self.generator = torch.Generator().manual_seed(seed)
        self.begin(rank, gram)

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        """Make the parameters."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.change(x)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """The change of W, applied to x [..., K]."""
        raise NotImplementedError

    def parts(self) -> dict[str, torch.Tensor]:
        """The training form."""
        return {name: p.detach().contiguous() for name, p in self.named_parameters()}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5


class Lora(Change):
    """B A with B = 0 at first."""

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        self.A, self.B = nn.Parameter(self.normal(rank, self.inputs)), nn.Parameter(torch.zeros(self.outputs, rank))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.A), self.B)


class Corda(Change):
    """CorDA (arXiv 2406.05223) in its instruction-previewed form: B A begins as the largest components of W, oriented
    by the covariance C of the task's inputs (SVD of W C, and V^T C^-1), and is trained against W - B0 A0."""

    calibrated = True
    lr = 1e-4

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        assert gram is not None, "CorDA is calibrated"
        c, share, eye = gram.double(), DAMPING, torch.eye(self.inputs, dtype=torch.float64)
        while True:
            damped = c + share * c.diagonal().mean() * eye
            inverse = torch.linalg.inv(damped)
            if torch.linalg.matrix_norm(damped @ inverse - eye) < PRECISE:
                break
            share *= 2
        u, s, vt = torch.linalg.svd(self.weight.double() @ damped, full_matrices=False)
        root = s[:rank].sqrt()
        a, b = (root[:, None] * (vt[:rank] @ inverse)).float(), (u[:, :rank] * root).float().contiguous()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.register_buffer("A0", a.clone())
        self.register_buffer("B0", b.clone())

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.A), self.B) - F.linear(F.linear(x, self.A0), self.B0)

    def parts(self) -> dict[str, torch.Tensor]:
        return super().parts() | {"A0": self.A0, "B0": self.B0}


class Paca(Change):
    """PaCA (ICLR 2025): columns of W, chosen at random, are trained in place. Their gradient needs only the inputs of
    these columns."""

    lr = 5e-4

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        count = min(self.inputs, rank * (self.inputs + self.outputs) // self.outputs)
        chosen = torch.randperm(self.inputs, generator=self.generator)[:count].sort().values
        self.register_buffer("columns", chosen.int())
        self.values = nn.Parameter(self.weight[:, chosen].clone())

    def change(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.columns.long()
        return F.linear(x[..., chosen], self.values - self.weight[:, chosen])

    def parts(self) -> dict[str, torch.Tensor]:
        return super().parts() | {"columns": self.columns}


class Hydra(Change):
    """Hydra (arXiv 2309.06922): a parallel branch B A on the input, and a sequential one Bs As on the output of W."""

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        half = max(1, rank // 2)
        rest = max(1, (rank - half) * (self.inputs + self.outputs) // (2 * self.outputs))
        self.A, self.B = nn.Parameter(self.normal(half, self.inputs)), nn.Parameter(torch.zeros(self.outputs, half))
        self.As, self.Bs = nn.Parameter(self.normal(rest, self.outputs)), nn.Parameter(torch.zeros(self.outputs, rest))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        parallel = F.linear(F.linear(x, self.A), self.B)
        return parallel + F.linear(F.linear(F.linear(x, self.weight), self.As), self.Bs)


class Soka(Change):
    """SoKA (arXiv 2506.15251): a sum of Kronecker products s U (x) V from the SVD of the rearranged W (KPSVD), with the
    factors' shapes chosen so that the sum has a low rank. The paper leaves shapes and the number of products open; here
    s = 0 at first, so that the change begins at zero."""

    outer = 4  # U is [N / 8, outer] and V [8, K / outer]: a product of at most rank 4 * outer

    def begin(self, rank: int, gram: torch.Tensor | None) -> None:
        m, n = self.outputs // 8, self.outer
        blocks = self.weight.view(m, 8, n, self.inputs // n).permute(0, 2, 1, 3).reshape(m * n, -1)
        u, _, vt = torch.linalg.svd(blocks.double(), full_matrices=False)
        numbers = m * n + 8 * (self.inputs // n)
        count = max(1, min(2, rank * (self.inputs + self.outputs) // numbers))
        self.U = nn.Parameter(u.t()[:count].view(count, m, n).float())
        self.V = nn.Parameter(vt[:count].view(count, 8, -1).float())
        self.s = nn.Parameter(torch.zeros(count))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unflatten(-1, (self.outer, -1))  # (U (x) V) x = vec(U X V^T)
        products = [s * (u @ (rows @ v.t())).flatten(-2) for s, u, v in zip(self.s, self.U, self.V)]
        return sum(products)


METHODS: dict[str, type[Change]] = {"lora": Lora, "corda": Corda, "paca": Paca, "hydra": Hydra, "soka": Soka}
