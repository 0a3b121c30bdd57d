"""`PretrainService`: packed rows of text as token batches."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_like.artifacts.errors import InputError
from nemo_rl_like.artifacts.hashing import hash_json
from nemo_rl_like.cluster.context import RankContext
from nemo_rl_like.data.datasets import hold_out
from nemo_rl_like.data.document_ids import document_ids
from nemo_rl_like.data.documents import Documents, load_documents
from nemo_rl_like.data.packing import PackedDocuments, PackedRow, piece_rows
from nemo_rl_like.data.render import Renderer
from nemo_rl_like.data.trained_rows import TrainedRows
from nemo_rl_like.spec.pretrain import PretrainStageSpec, TextDataSpec
from nemo_rl_like.training.data_service import DataService


class PackedText:
    """Packed rows of the training documents, in an order of each epoch's own, and of the held-out ones, in theirs.

    All ids are in memory, four bytes a token.
    """

    def __init__(self, data: TextDataSpec, fraction: float, tokenizer_folder: str, sequence_tokens: int, seed: int):
        """Read and tokenize the text. Raises InputError."""
        documents = load_documents(data.paths, data.text_key)
        train, held = _split(documents, fraction, seed)
        tokenizer = Renderer.load(tokenizer_folder).tokenizer
        self.source = documents.source
        self.sha256 = hash_json([documents.sha256, fraction, sequence_tokens])
        self._train = PackedDocuments(document_ids(train, tokenizer, self.source), sequence_tokens, seed)
        self._held = PackedDocuments(document_ids(held, tokenizer, self.source), sequence_tokens, None)

    def train_size(self) -> int:
        """Rows of an epoch."""
        return self._train.rows

    def train(self, index: int, epoch: int) -> PackedRow:
        """One row of an epoch."""
        return self._train.row(index, epoch)

    def validation(self, count: int) -> list[PackedRow]:
        """The first `count` held-out rows."""
        return [self._held.row(index, 0) for index in range(min(count, self._held.rows))]


class PretrainService(DataService[PackedRow]):
    """Batches of packed rows."""

    def __init__(
        self,
        context: RankContext | None,
        *,
        data: TextDataSpec,
        tokenizer_folder: str,
        seed: int,
        sequence_tokens: int,
        validation_fraction: float = 0.0,
    ) -> None:
        """Read, check and tokenize the text. Raises InputError."""
        self._across = data.attend_across_documents
        examples = PackedText(data, validation_fraction, tokenizer_folder, sequence_tokens, seed)
        super().__init__(examples, tokenizer_folder=tokenizer_folder, seed=seed, max_tokens=sequence_tokens)

    def _rows(self, examples: Sequence[PackedRow]) -> TrainedRows:
        return TrainedRows(tuple(piece_rows(examples, attend_across_documents=self._across)))


def _split(documents: Documents, fraction: float, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Training and held-out texts."""
    return hold_out(documents.texts, lambda text: text, fraction, seed)


def sequence_tokens_of(asked: int | None, context: int) -> int:
    """Length of a packed row. Raises InputError if it is longer than the context."""
    wanted = asked or context
    if wanted > context:
        raise InputError(
            f"`sequence_tokens` is {wanted}, more than the context of {context}; lower it, or raise the model's `max_positions` or "
            "`engine.max_context`"
        )
    return wanted


def check_text(stage: PretrainStageSpec, seed: int) -> None:
    """Open the text and see that something is held out where it must be. Raises InputError."""
    documents = load_documents(stage.data.paths, stage.data.text_key)
    _, held = _split(documents, stage.data.validation_fraction, seed)
    if stage.validate_every_steps and not held:
        raise InputError(
            f"{documents.source}: `data.validation_fraction` {stage.data.validation_fraction} holds out none of {len(documents.texts)} "
            "documents, and `validate_every_steps` needs some; raise it, or set `validate_every_steps: 0`"
        )
