"""The kernels as plain functions of numpy arrays and torch tensors; each is loaded when it is first called."""

from __future__ import annotations

from kartifacts.ops.activation import gelu_tanh_and_mul, silu_and_mul
from kartifacts.ops.norm import fused_add_rmsnorm, layernorm, rmsnorm
from kartifacts.ops.rope import apply_rope

__all__ = ["apply_rope", "fused_add_rmsnorm", "gelu_tanh_and_mul", "layernorm", "rmsnorm", "silu_and_mul"]
