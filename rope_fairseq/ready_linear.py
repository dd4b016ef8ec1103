"""Linear layers that translate and no longer learn: their weights are kept as a product reads them.

Only models that ``make_generation_fast_`` has closed for training use this. Before that a weight
may change unseen: fairseq's optimizers write to ``parameter.data``, which has no version.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rope_fairseq.projection import is_plain_linear


def _has_packed_product() -> bool:
    """Whether torch has oneDNN's product with packed weights (which ``torch.compile`` uses)."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


class ReadyWeight:
    """The weight and the bias of a linear layer, made ready at its first product.

    Made again when a parameter was changed, replaced, moved or cast. They are in autocast's dtype
    where autocast is on, which else casts them anew at every step, and on a CPU in float32 packed
    for oneDNN: a product of 128 rows with a weight [37000, 512] took 0.6 of the time, one of 4 rows
    with any weight 0.5 to 0.7. They are in no state dict, and copies of a model start without.
    """

    def __init__(self) -> None:
        self._made_from: tuple[Any, ...] = ()
        # Keeps the memory that was read, so that nothing else can come to its address.
        self._read: list[Tensor] = []
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._packed = False

    def __reduce__(self) -> tuple[type["ReadyWeight"], tuple[()]]:
        return ReadyWeight, ()

    def product(self, x: Tensor, layer: nn.Linear) -> Tensor:
        """x·Wᵀ + b, [..., out_features], of x [..., in_features]; no gradient flows back."""
        device = x.device.type
        dtype = layer.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        parameters = [p for p in (layer.weight, layer.bias) if p is not None]
        versions = [0 if p.is_inference() else p._version for p in parameters]
        state = ((p.data_ptr(), p.dtype) for p in parameters)
        made_from = (dtype, *versions, *state)
        if made_from != self._made_from:
            self._make(layer, dtype)
            self._made_from, self._read = made_from, [p.detach() for p in parameters]
        assert self._weight is not None
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x.to(dtype), self._weight, self._bias, "none", [], ""
            )
            return product
        return F.linear(x.to(dtype), self._weight, self._bias)

    def _make(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        self._weight = layer.weight.detach().to(dtype)
        self._bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        self._packed = (
            self._weight.device.type == "cpu" and dtype == torch.float32 and _has_packed_product()
        )
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)


class ReadyLinear(nn.Linear):
    """A linear layer that computes with a :class:`ReadyWeight` while no gradient is recorded."""

    ready: ReadyWeight

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        return self.ready.product(input, self)


def make_linears_ready(module: nn.Module) -> None:
    """Turn the plain linear layers in ``module`` into :class:`ReadyLinear`, in place: parameters
    and their names stay."""
    for layer in module.modules():
        if is_plain_linear(layer):
            layer.__class__ = ReadyLinear
            layer.ready = ReadyWeight()  # type: ignore[assignment]
