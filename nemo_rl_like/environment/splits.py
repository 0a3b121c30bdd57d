"""The content split, for authors of environments."""

from nemo_rl_like.data.content_split import SPLITS, Split, Splits, content_hash, split_by_content

__all__ = ["SPLITS", "Split", "Splits", "content_hash", "split_by_content"]
