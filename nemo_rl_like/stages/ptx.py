"""The auxiliary pretraining loss of a stage: its data service and its checks."""

from __future__ import annotations

from nemo_rl_like.cluster.group import WorkerGroup
from nemo_rl_like.data.document_ids import end_token
from nemo_rl_like.data.documents import load_documents
from nemo_rl_like.spec.experiment import ExperimentSpec
from nemo_rl_like.spec.pretrain import PtxSpec
from nemo_rl_like.stages.shapes import config_of, renderer_of
from nemo_rl_like.stages.start_model import StartModel
from nemo_rl_like.stages.workers import context_tokens
from nemo_rl_like.training.pretrain_service import sequence_tokens_of
from nemo_rl_like.training.ptx import PTX, Ptx

SERVICE = "nemo_rl_like.training.pretrain_service:PretrainService"


def start_ptx(asked: PtxSpec | None, workers: WorkerGroup, spec: ExperimentSpec, model: StartModel) -> Ptx | None:
    """Host the text beside the stage's own data; None where the stage has none."""
    if asked is None:
        return None
    kwargs: dict[str, object] = {
        "data": asked,
        "tokenizer_folder": str(model.folder.resolve()),
        "seed": spec.seed,
        "sequence_tokens": sequence_tokens_of(asked.sequence_tokens, context_tokens(spec, model.config)),
    }
    workers.host(PTX, SERVICE, kwargs)
    return Ptx(asked, workers)


def check_ptx(asked: PtxSpec | None, spec: ExperimentSpec) -> None:
    """The text is there, and its rows fit the context. Raises InputError."""
    if asked is None:
        return
    end_token(renderer_of(spec).tokenizer)
    sequence_tokens_of(asked.sequence_tokens, context_tokens(spec, config_of(spec)))
    load_documents(asked.paths, asked.text_key)
