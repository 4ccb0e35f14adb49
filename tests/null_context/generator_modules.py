"""Small re-statements of the cross-attention interfaces of public sparse-3D generators: names, shapes, arithmetic.

Kept: submodule names, the layout of projections, the order of operations, how a condition travels. Left out: all else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ---- TRELLIS, and Direct3D-S2, whose modules are alike ---------------------------------------------------------------


class HeadNorm(nn.Module):
    """Per head: unit length times gamma times sqrt(D), in float32."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.scale = width**0.5
        self.gamma = nn.Parameter(torch.ones(heads, width))

    def forward(self, x: Tensor) -> Tensor:
        return (F.normalize(x.float(), dim=-1) * self.gamma * self.scale).to(x.dtype)


class MultiHeadAttention(nn.Module):
    """The dense one. x: [B, N, C]; context: [B, L, Dc] -> [B, N, C]"""

    def __init__(self, channels, heads, context_channels=None, kind="cross", qk_rms_norm=False, bias=True):
        super().__init__()
        self.num_heads, self._type, self.qk_rms_norm = heads, kind, qk_rms_norm
        if kind == "self":
            self.to_qkv = nn.Linear(channels, 3 * channels, bias=bias)
        else:
            self.to_q = nn.Linear(channels, channels, bias=bias)
            self.to_kv = nn.Linear(context_channels, 2 * channels, bias=bias)
        if qk_rms_norm:
            self.q_rms_norm = HeadNorm(channels // heads, heads)
            self.k_rms_norm = HeadNorm(channels // heads, heads)
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x, context=None, indices=None):
        batch, tokens, _ = x.shape
        if self._type == "self":
            q, k, v = self.to_qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).unbind(2)
        else:
            q = self.to_q(x).reshape(batch, tokens, self.num_heads, -1)
            k, v = self.to_kv(context).reshape(batch, context.shape[1], 2, self.num_heads, -1).unbind(2)
        if self.qk_rms_norm:
            q, k = self.q_rms_norm(q), self.k_rms_norm(k)
        h = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return self.to_out(h.transpose(1, 2).reshape(batch, tokens, -1))


class SparseTensor:
    """feats: [N, C]; coords: [N, 4] (batch, x, y, z). One batch entry."""

    def __init__(self, feats, coords):
        self.feats, self.coords = feats, coords

    def replace(self, feats):
        return SparseTensor(feats, self.coords)

    def type(self, dtype):
        return self.replace(self.feats.type(dtype))

    def __add__(self, other):
        return self.replace(self.feats + (other.feats if isinstance(other, SparseTensor) else other))

    @property
    def dtype(self):
        return self.feats.dtype


class SparseMultiHeadAttention(nn.Module):
    """x: sparse [N, C]; context: [1, L, Dc], or sparse [L, Dc] -> sparse [N, C]"""

    def __init__(self, channels, heads, context_channels, qk_rms_norm=True):
        super().__init__()
        self.num_heads, self._type, self.qk_rms_norm = heads, "cross", qk_rms_norm
        self.to_q = nn.Linear(channels, channels)
        self.to_kv = nn.Linear(context_channels, 2 * channels)
        if qk_rms_norm:
            self.q_rms_norm = HeadNorm(channels // heads, heads)
            self.k_rms_norm = HeadNorm(channels // heads, heads)
        self.to_out = nn.Linear(channels, channels)

    @staticmethod
    def _linear(module, x):
        return x.replace(module(x.feats)) if isinstance(x, SparseTensor) else module(x)

    def forward(self, x, context=None):
        q = self._linear(self.to_q, x).feats.reshape(len(x.feats), self.num_heads, -1)
        kv = self._linear(self.to_kv, context)
        kv = kv.feats if isinstance(kv, SparseTensor) else kv[0]
        k, v = kv.reshape(len(kv), 2, self.num_heads, -1).unbind(1)
        if self.qk_rms_norm:
            q, k = self.q_rms_norm(q), self.k_rms_norm(k)
        h = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (q, k, v)))
        return self._linear(self.to_out, x.replace(h[0].transpose(0, 1).reshape(len(x.feats), -1)))


class DenseDenoiser(nn.Module):
    """The structure stage of TRELLIS, and the dense stage of Direct3D-S2: the condition is cast, and goes to blocks."""

    def __init__(self, channels=32, heads=4, context_channels=24, blocks=2, dtype=torch.float32, qk_rms_norm=True):
        super().__init__()
        self.dtype = dtype
        self.self_attn = nn.ModuleList(MultiHeadAttention(channels, heads, kind="self") for _ in range(blocks))
        self.cross_attn = nn.ModuleList(
            MultiHeadAttention(channels, heads, context_channels, qk_rms_norm=qk_rms_norm) for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(channels, elementwise_affine=False)
        self.to(dtype)

    def forward(self, x, t, cond):
        h, cond = x.type(self.dtype), cond.type(self.dtype)
        for attention, cross in zip(self.self_attn, self.cross_attn, strict=True):
            h = h + attention(self.norm(h)) * t
            h = h + cross(self.norm(h), cond)
        return h.type(x.dtype)


class SparseDenoiser(nn.Module):
    """A sparse stage: TRELLIS's takes its dense condition as it is; with `sparse_conditions`, as in Direct3D-S2, the
    condition is projected, and each of its tokens gets an embedding of its position."""

    def __init__(self, channels=32, heads=4, context_channels=24, blocks=2, sparse_conditions=False):
        super().__init__()
        self.dtype, self.sparse_conditions = torch.float32, sparse_conditions
        if sparse_conditions:
            self.cond_proj = nn.Linear(context_channels, context_channels)
            self.frequencies = nn.Parameter(torch.randn(3, context_channels))
        self.cross_attn = nn.ModuleList(
            SparseMultiHeadAttention(channels, heads, context_channels) for _ in range(blocks)
        )

    def forward(self, x, t, cond):
        h, cond = x.type(self.dtype), cond.type(self.dtype)
        if self.sparse_conditions:
            cond = cond.replace(self.cond_proj(cond.feats))
            cond = cond + torch.sin(cond.coords[:, 1:].to(cond.dtype) @ self.frequencies)
        for cross in self.cross_attn:
            h = h + cross(h.replace(F.layer_norm(h.feats, h.feats.shape[-1:]) * t), cond)
        return h


# ---- Hunyuan3D 2.1 ---------------------------------------------------------------------------------------------------


class CrossAttention(nn.Module):
    """x: [B, N, C]; y: [B, L, Dc]. Keys and values, side by side, are cut into heads: values are pieces of both."""

    def __init__(self, qdim, kdim, num_heads, qkv_bias=True, qk_norm=True, with_decoupled_ca=False):
        super().__init__()
        self.qdim, self.kdim, self.num_heads = qdim, kdim, num_heads
        self.head_dim = qdim // num_heads
        self.to_q = nn.Linear(qdim, qdim, bias=qkv_bias)
        self.to_k = nn.Linear(kdim, qdim, bias=qkv_bias)
        self.to_v = nn.Linear(kdim, qdim, bias=qkv_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.out_proj = nn.Linear(qdim, qdim)
        self.with_dca = with_decoupled_ca

    def forward(self, x, y):
        batch, tokens, _ = x.shape
        length = y.shape[1]
        q, k, v = self.to_q(x), self.to_k(y), self.to_v(y)
        kv = torch.cat((k, v), dim=-1).view(1, -1, self.num_heads, 2 * self.head_dim)
        k, v = torch.split(kv, self.head_dim, dim=-1)
        q = self.q_norm(q.view(batch, tokens, self.num_heads, self.head_dim))
        k = self.k_norm(k.view(batch, length, self.num_heads, self.head_dim))
        v = v.view(batch, length, self.num_heads, self.head_dim)
        h = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return self.out_proj(h.transpose(1, 2).reshape(batch, tokens, -1))


class HunyuanDenoiser(nn.Module):
    """Batched guidance over a dictionary of contexts, conditional first."""

    def __init__(self, channels=32, heads=4, context_channels=24, blocks=2, qkv_bias=False, **more):
        super().__init__()
        self.attn2 = nn.ModuleList(
            CrossAttention(channels, context_channels, heads, qkv_bias, **more) for _ in range(blocks)
        )
        self.norm2 = nn.LayerNorm(channels)

    def forward(self, x, t, contexts):
        for attention in self.attn2:
            x = x + attention(self.norm2(x), contexts["main"]) * t
        return x
