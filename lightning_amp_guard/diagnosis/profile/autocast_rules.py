# SPDX-License-Identifier: Apache-2.0
"""What autocast does with one call, and why a product stayed in float32."""

from __future__ import annotations

import torch

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.profile.calls import Call

__all__ = ["FLOAT32_OPS", "is_matmul", "is_missed", "is_ruleless", "note_of", "reason_of"]

# "Ops that autocast to float32" on CUDA, https://docs.pytorch.org/docs/stable/amp.html: the
# operators whose range or accuracy is short in half precision, whether the device has a rule or not.
_FLOAT32_OPS = """
    pow rdiv rpow rtruediv acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss
    cdist cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm
    hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2
    margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize
    pdist poisson_nll_loss prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax
    softmin softplus sum renorm tan triplet_margin_loss
"""
FLOAT32_OPS = frozenset(_FLOAT32_OPS.split())
# Of these, torch's kernels accumulate in float32 and their results are small.
_SAFE_INSIDE = {
    *("softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "nll_loss"),
}
_MATMUL_OPS = """
    mm addmm bmm baddbmm addbmm matmul linear convolution _convolution conv1d conv2d conv3d
    mkldnn_convolution mkldnn_linear cudnn_convolution _addmm_activation mkldnn_rnn_layer
    _cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell
"""
_MATMULS = frozenset(_MATMUL_OPS.split())
_MOVES_ONLY = """
    clone copy_ contiguous detach empty_like zeros_like ones_like full_like new_empty new_zeros
    new_ones new_full fill_ zero_ _unsafe_view unsafe_split transpose_ t_ squeeze_ unsqueeze_ repeat
"""
_MOVES = frozenset(_MOVES_ONLY.split())
_HALF = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_TORCHS = {"aten", "prims", "prim", "quantized", "mkldnn", "_c10d_functional", "c10d"}


def is_matmul(call: Call) -> bool:
    """Return whether the call multiplies matrices: what low precision makes faster."""
    name = _base(call)
    return name in _MATMULS or name.startswith("_scaled_dot_product")


def is_missed(call: Call) -> bool:
    """Return whether the call is a matrix product in float32 or wider that a line asked for."""
    wide = call.takes and all(dtype in _WIDE for dtype in call.takes)
    return bool(wide and call.place.source and is_matmul(call))


def reason_of(call: Call, device: str) -> str:
    """Return why autocast left a matrix product wide, and what to write."""
    if call.device != device:
        return f"it runs on {call.device}, autocast on {device}"
    if torch.float64 in call.takes:
        return "its inputs are float64, which autocast leaves alone: convert them with `.float()`"
    if call.backward and not call.autocast:
        return (
            "it runs in a backward pass written by hand, where autocast is off: decorate `backward`"
            f' with `torch.amp.custom_bwd(device_type="{device}")`'
        )
    if call.function and not call.autocast:
        return "autocast is off here: call it outside of `torch.autocast(..., enabled=False)`"
    if not _upstream.has_autocast_rule(call.op, device) and _is_variant(call):
        return (
            f"`{call.op}` has no autocast rule, as no in-place or `out=` variant has: write the"
            " plain one, `c = a @ b`"
        )
    if call.function.strip("_") in FLOAT32_OPS:
        return f"it is part of `{call.function}`, which autocast computes in float32"
    if _upstream.has_autocast_rule(call.op, device):
        return f"`{call.function or call.op}` computes it in {call.dtype} itself, as torch wrote it"
    return f"`{call.op}` has no autocast rule on {device}: convert its inputs"


def is_ruleless(call: Call, device: str) -> bool:
    """Return whether the call got low precision without a rule of autocast's about it.

    Left out are views, copies, casts, what computes in float32 all the same, and matrix products, whose
    rule belongs to the function around them.
    """
    if call.backward or call.view or call.is_cast or is_matmul(call) or _name(call) in _MOVES:
        return False
    if not any(dtype in _HALF for dtype in call.takes) or call.dtype in ("float32", "float64"):
        return False
    names = [call.op, call.name, f"aten::{_function(call)}"]
    return not any(_upstream.has_autocast_rule(name, device) for name in names)


def note_of(call: Call, device: str) -> str:
    """Return what to think of a call without a rule; empty where low precision does no harm."""
    if call.name.partition("::")[0] not in _TORCHS:
        return (
            f"a custom operator that runs in whatever dtype it gets: register its rule with"
            f' `torch.library.register_autocast("{call.name}", "{device}", torch.float32)`'
        )
    known = {_base(call).strip("_"), _function(call)} & FLOAT32_OPS
    if known and not known & _SAFE_INSIDE:
        return (
            f"autocast computes `{min(known)}` in float32 on CUDA, and has no rule for it on"
            f" {device}: write `x.float()` before it"
        )
    return ""


def _name(call: Call) -> str:
    return call.name.partition("::")[2]


def _base(call: Call) -> str:
    name = _name(call)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _function(call: Call) -> str:
    return call.function.strip("_")


def _is_variant(call: Call) -> bool:
    return call.name.endswith("_") or call.op.rpartition(".")[2].endswith("out")
