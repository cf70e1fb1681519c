"""A preallocated KV cache behind the model's attention seam."""

import torch
import torch.nn.functional as F
from torch import Tensor

from course.lm.model import Attention, Config, causal_attention


class KVCache:
    """Keys and values of `batch` sequences, each with room for `max_tokens`.

    `k` and `v`: [layers, batch, max_tokens, kv_heads, head_dim]. The token at position p of a
    sequence lies in slot p, so sequences of different lengths need no bookkeeping here: the
    positions say what is stored and who may see it.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.n_layers, batch, max_tokens, config.n_kv_heads, config.head_dim)
        # Zeros, since unwritten slots are multiplied by probability 0, and 0 * NaN is NaN.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def attend(self, positions: Tensor) -> Attention:
        """The attention of one forward pass over tokens at `positions`, int64 [batch, T].

        It stores the pass's keys and values, then lets the query at position p see slots 0..p.
        A position outside 0..max_tokens-1 raises ValueError before anything is stored.
        """
        batch, max_tokens = self.k.shape[1:3]
        if positions.ndim != 2 or positions.shape[0] != batch or positions.shape[1] == 0:
            raise ValueError(f"positions {list(positions.shape)} must be [{batch}, T], T >= 1")
        first, last = (int(x) for x in positions.aminmax())
        if first < 0 or last >= max_tokens:
            raise ValueError(f"positions {first}..{last} must lie in 0..{max_tokens - 1}")
        # Views made once here rather than in every layer: at one token they cost as much as a norm.
        stored_k, stored_v = self.k.unbind(), self.v.unbind()
        seen_k = self.k[:, :, : last + 1].transpose(2, 3).unbind()  # layers of [B, Hkv, S, D]
        seen_v = self.v[:, :, : last + 1].transpose(2, 3).unbind()
        slots = torch.arange(last + 1, device=positions.device)
        visible = slots <= positions[..., None]  # [B, T, S]
        mask = None if visible.all() else visible[:, None]  # [B, 1, T, S]
        from_start = positions.shape[1] == last + 1 and bool((positions == slots).all())
        sequence = torch.arange(batch, device=positions.device)[:, None]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            stored_k[layer][sequence, positions] = k
            stored_v[layer][sequence, positions] = v
            if from_start:  # all that may be seen is in this pass: faster than a mask
                return causal_attention(layer, q, k, v)
            if q.shape[1] > 1:
                return F.scaled_dot_product_attention(
                    q.transpose(1, 2), seen_k[layer], seen_v[layer], mask, enable_gqa=True
                ).transpose(1, 2)
            # One query: the heads of a group become the queries of their KV head.
            groups = q.reshape(batch, k.shape[2], -1, q.shape[3])  # [B, Hkv, H/Hkv, D]
            o = F.scaled_dot_product_attention(groups, seen_k[layer], seen_v[layer], mask)
            return o.reshape(q.shape)

        return attention
