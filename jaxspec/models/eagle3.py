"""The EAGLE-3 head (Li et al., arXiv 2503.01840): one Llama layer over the target's taps and the next token's embedding."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import Decoder, master_dtype
from jaxspec.models.layers import Heads, dense, rms_norm, swiglu
from jaxspec.models.rope import rotary_table, rotate


class VocabularyMap(nnx.Variable):
    """Ids of the target's tokens that a draft can propose, int32, ascending; it travels with the weights but is never trained."""


class Eagle3(nnx.Module):
    """Draft slot t sees the taps of position t and token t+1, and predicts token t+2.

    The embedding is the target's. `fuse` is applied to true taps only; deeper steps feed the previous step's pre-norm output instead.
    """

    with_taps = True

    def __init__(self, config: ModelConfig, key: Key[Array, ""], vocab: int = 0, ffn: int = 0):
        """Random weights; `vocab` rows in the head (0: the target's whole vocabulary), `ffn` the feed-forward width (0: the target's)."""
        dtype = master_dtype(config)
        keys = iter(jax.random.split(key, 9))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, ffn or config.ffn
        self.config = config
        self.depth = 1
        self.fuse = dense(next(keys), (3 * d, d), 3 * d, dtype)
        self.embedding_norm = nnx.Param(jnp.ones((d,), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((d,), dtype))
        # One layer, stacked like the policy's: the logical axes are then the same.
        self.query = dense(next(keys), (1, 2 * d, n, h), 2 * d, dtype)
        self.key = dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.value = dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.output = dense(next(keys), (1, n, h, d), n * h, dtype)
        self.ffn_norm = nnx.Param(jnp.ones((d,), dtype))
        self.gate = dense(next(keys), (1, d, f), d, dtype)
        self.up = dense(next(keys), (1, d, f), d, dtype)
        self.down = dense(next(keys), (1, f, d), f, dtype)
        self.norm = nnx.Param(jnp.ones((d,), dtype))
        self.head = dense(next(keys), (d, vocab or config.vocab), d, dtype)
        self.vocabulary = nnx.data(VocabularyMap(jnp.arange(vocab, dtype=jnp.int32)) if vocab else None)

    def read(self, features: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """Joins the three taps into one hidden state."""
        return jnp.einsum("BTC,CD->BTD", features, self.fuse[...])

    def heads(self, layer: int, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Heads:
        """Queries, keys and values of [norm(embedding), norm(hidden)], rotated to `positions`; the residual is `hidden` as it is."""
        eps = self.config.norm_eps
        joined = jnp.concatenate([rms_norm(embedded, self.embedding_norm[...], eps), rms_norm(hidden, self.hidden_norm[...], eps)], axis=-1)
        table = rotary_table(positions, self.config, hidden.dtype)
        query = rotate(jnp.einsum("BTC,CNH->BTNH", joined, self.query[layer]), table)
        key = rotate(jnp.einsum("BTC,CMH->BTMH", joined, self.key[layer]), table)
        return Heads(query, key, jnp.einsum("BTC,CMH->BTMH", joined, self.value[layer]), hidden)

    def finish(self, layer: int, residual: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The rest of the layer; its pre-norm output is the next depth's hidden state."""
        x = residual + jnp.einsum("BTNH,NHD->BTD", attended, self.output[layer])
        normed = rms_norm(x, self.ffn_norm[...], self.config.norm_eps)
        return x + swiglu(normed, self.gate[layer], self.up[layer], self.down[layer])

    def draft_logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits over the draft's own vocabulary in at least float32, of pre-norm outputs; `target` lends nothing here."""
        logits = jnp.einsum("BTD,DW->BTW", rms_norm(hidden, self.norm[...], self.config.norm_eps), self.head[...])
        return logits.astype(np.promote_types(logits.dtype, np.float32))

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The same over the target's vocabulary, -inf outside the draft's."""
        logits = self.draft_logits(target, hidden)
        if self.vocabulary is None:
            return logits
        whole = jnp.full((*logits.shape[:-1], self.config.vocab), -jnp.inf, logits.dtype)
        return whole.at[..., self.vocabulary[...]].set(logits, indices_are_sorted=True, unique_indices=True)


def with_vocabulary(network: Eagle3, ids: np.ndarray) -> Eagle3:
    """The network with `ids` as the tokens of its head's rows, which must be trained (again) for them; on the host, never in a jit.

    Raises:
      ValueError: the network has the whole vocabulary, or `ids` are not as many as its rows, ascending and inside the target's vocabulary.
    """
    rows, vocab = network.head.shape[-1], network.config.vocab
    if network.vocabulary is None:
        raise ValueError(f"a draft with the whole vocabulary of {vocab} tokens takes no map; it was given {ids.size} ids")
    if ids.shape != (rows,):
        raise ValueError(f"the draft's head has {rows} rows, but the vocabulary map has shape {ids.shape}")
    falls = np.flatnonzero(ids[1:] <= ids[:-1])
    if falls.size:
        raise ValueError(f"ids of the vocabulary map must ascend: entry {falls[0]} is {ids[falls[0]]}, the next one {ids[falls[0] + 1]}")
    if ids[0] < 0 or ids[-1] >= vocab:
        raise ValueError(f"ids of the vocabulary map are {ids[0]}..{ids[-1]}, but the target's vocabulary is 0..{vocab - 1}")

    def one(leaf: nnx.Variable) -> nnx.Variable:
        return VocabularyMap(jax.device_put(ids.astype(np.int32), leaf[...].sharding)) if isinstance(leaf, VocabularyMap) else leaf

    return jax.tree.map(one, network, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
