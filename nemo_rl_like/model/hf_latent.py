"""Multi-head latent attention, from and to a Hugging Face `config.json`: what of a token's keys and values is kept, and how wide heads are."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_like.model.hf_fields import HfFields


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Keys and values of all heads are made from one narrow vector of a token (DeepSeek-V2, arXiv 2405.04434, sec. 2.1). Widths in channels."""

    query_rank: int | None
    """Width of the vector that queries are made from; None: the hidden state."""
    key_value_rank: int
    """Width of the vector that keys and values are made from."""
    plain_width: int
    """Of a head's queries and keys, the part without positions."""
    rotary_width: int
    """The part that positions turn; of keys, one for all heads."""
    value_width: int
    """Of a head's values; at most that of its queries and keys."""
    interleaved: bool
    """Positions turn neighbouring channels; False: those half of `rotary_width` apart."""

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.plain_width + self.rotary_width

    def projections(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """(out, in) of each matrix, by Hugging Face's name."""
        queries = heads * self.head_dim
        found = {"q_proj": (queries, hidden)}
        if self.query_rank is not None:
            found = {"q_a_proj": (self.query_rank, hidden), "q_b_proj": (queries, self.query_rank)}
        return {
            **found,
            "kv_a_proj_with_mqa": (self.key_value_rank + self.rotary_width, hidden),
            "kv_b_proj": (heads * (self.plain_width + self.value_width), self.key_value_rank),
            "o_proj": (hidden, heads * self.value_width),
        }

    def to_hf_dict(self, interleave_key: str | None) -> dict[str, object]:
        """The part of a config.json that says so."""
        return {
            **({} if interleave_key is None else {interleave_key: self.interleaved}),
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.key_value_rank,
            "qk_nope_head_dim": self.plain_width,
            "qk_rope_head_dim": self.rotary_width,
            "v_head_dim": self.value_width,
            "head_dim": self.rotary_width,
        }


class LatentReader(HfFields):
    """Reads the widths of latent attention."""

    def config(self, heads: int, interleave_key: str | None) -> LatentConfig:
        """Of a model of so many heads. Raises InputError naming the field that is not supported."""
        rotary, plain = self.integer("qk_rope_head_dim"), self.integer("qk_nope_head_dim")
        values = self.integer("v_head_dim")
        if rotary % 2:
            raise self.error("qk_rope_head_dim", f"is {rotary}; positions turn pairs of channels, so it must be even")
        if values > plain + rotary:
            raise self.error(
                "v_head_dim",
                f"is {values}, more than the {plain + rotary} of queries and keys (qk_nope_head_dim + qk_rope_head_dim)",
            )
        keys = self._raw.get("num_key_value_heads")
        if keys is not None and keys != heads:
            raise self.error(
                "num_key_value_heads", f"is {keys}; latent attention has keys and values for all {heads} heads"
            )
        return LatentConfig(
            query_rank=None if self._raw.get("q_lora_rank") is None else self.integer("q_lora_rank"),
            key_value_rank=self.integer("kv_lora_rank"),
            plain_width=plain,
            rotary_width=rotary,
            value_width=values,
            interleaved=interleave_key is None or bool(self._raw.get(interleave_key, True)),
        )
